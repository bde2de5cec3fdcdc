// The live page: one stream of samples in, numbers and charts out. No library but uPlot, no request but to this server.
"use strict";

const byId = (id) => document.getElementById(id);
const colours = ["--c0", "--c1", "--c2", "--c3"];
const colour = (i) => getComputedStyle(document.documentElement).getPropertyValue(colours[i % colours.length]).trim();
const KEPT = 300;
const RETRY_MS = 2000;
const BOUND_MS = 10_000;

let history = [];
let chosen = null; // the model shown; null: the first
let token = sessionStorage.getItem("token") || "";
let charts = {};
let boundAsked = 0; // when, by the browser's clock
let card = null; // metadata and configuration of the model shown

const number = (value, digits) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits ?? (value < 10 ? 2 : value < 100 ? 1 : 0) });
const text = (id, value) => { if (byId(id).textContent !== value) byId(id).textContent = value; };
const headers = () => (token ? { authorization: `Bearer ${token}` } : {});

function node(name, content, attributes) {
  const made = document.createElement(name);
  if (content !== undefined) made.append(content);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  return made;
}

function rows(id, content) {
  const titles = [...byId(id).tHead.rows[0].cells].map((title) => title.textContent);
  byId(id).tBodies[0].replaceChildren(...content.map((cells) => {
    const row = node("tr");
    // A phone shows a wide table's row as lines, each with its column's title.
    cells.forEach((cell, i) => row.append(i ? node("td", cell, { "data-title": titles[i] }) : node("th", cell, { scope: "row" })));
    return row;
  }));
}

// ---- the stream

async function follow() {
  for (;;) {
    try {
      const response = await fetch("/live/events", { headers: headers() });
      if (response.status === 401) { askForToken(); return; }
      if (!response.ok) throw new Error(`status ${response.status}`);
      await read(response.body.getReader());
    } catch { /* the server is away: said in the state, tried again below */ }
    showState("disconnected", "bad");
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function read(reader) {
  const decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, { stream: true });
    for (let end; (end = buffer.indexOf("\n\n")) >= 0; buffer = buffer.slice(end + 2)) take(buffer.slice(0, end));
  }
}

function take(event) {
  const fields = Object.fromEntries(event.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
  if (!fields.data) return;
  const data = JSON.parse(fields.data);
  history = fields.event === "history" ? data : [...history, data].slice(-KEPT);
  if (history.length) show(history[history.length - 1]);
}

function askForToken() {
  showState("token needed", "bad");
  byId("token-form").hidden = false;
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value;
  sessionStorage.setItem("token", token);
  byId("token-form").hidden = true;
  follow();
});

// ---- numbers

const modelOf = (sample) => sample.models.find((model) => model.name === chosen) || sample.models[0];

function showState(words, kind) {
  text("state", words);
  byId("state").className = `pill ${kind}`;
}

function show(sample) {
  showState(sample.ready ? "ready" : sample.state === "serving" ? "not ready" : sample.state, sample.ready ? "good" : "bad");
  text("uptime", duration(sample.uptime_s));
  const model = modelOf(sample);
  if (!model) return;
  showModels(sample.models, model.name);
  text("name", model.name);
  text("router", model.router.split("/").pop());
  text("throughput", number(model.throughput));
  text("p50", number(model.p50_ms));
  text("p99", number(model.p99_ms));
  const joules = model.energy_per_item_j;
  text("energy", joules === null ? "–" : number(joules < 1 ? joules * 1e3 : joules));
  const sources = new Set(model.servers.map((server) => server.energy_source).filter(Boolean));
  text("energy-unit", joules !== null && joules >= 1 ? "J/item" : "mJ/item");
  text("energy-source", sources.size ? `, ${[...sources].join(", ")}` : "");
  text("accuracy", model.expected_accuracy === null ? "–" : number(model.expected_accuracy * 100, 1));
  text("right", model.agreement ? "agreement" : "accuracy"); // with the best variant, where images had no labels
  text("in-flight", number(model.items.in_flight, 0));
  text("fifo", number(model.fifo, 0));
  showServers(model.servers);
  showWidths(model.widths);
  showPasses(model);
  showRouter(model);
  rows("outcomes", ["received", "answered", "rejected", "expired", "cancelled", "failed", "in_flight"].map((key) => [
    key.replace("_", " "), number(model.items[key], 0), number(model.requests[key], 0)]));
  draw(model);
  if (!card || card.name !== model.name) loadCard(model.name);
}

function showModels(models, current) {
  const select = byId("model");
  const names = models.map((model) => model.name);
  select.hidden = names.length < 2;
  if ([...select.options].map((option) => option.value).join() !== names.join()) {
    select.replaceChildren(...names.map((name) => node("option", name, { value: name })));
  }
  select.value = current;
}

byId("model").addEventListener("change", (event) => {
  chosen = event.target.value;
  card = null;
  boundAsked = 0;
  Object.values(charts).forEach((chart) => chart.destroy());
  charts = {};
  if (history.length) show(history[history.length - 1]);
});

function gauge(share, words) {
  if (share === null || share === undefined) return "unknown";
  const cell = document.createDocumentFragment();
  cell.append(node("meter", "", { min: 0, max: 1, value: share, "aria-label": words }), ` ${words}`);
  return cell;
}

function showServers(servers) {
  rows("servers", servers.map((server) => [
    server.name,
    server.up ? `up${(server.pace ?? 1) === 1 ? "" : `, ${number(server.pace, 1)} times its profile's time`}` : "out of service",
    server.queue === undefined ? "unknown" : number(server.queue, 0),
    `${number(server.outstanding, 0)} of ${number(server.credit, 0)}`,
    gauge(server.utilization, `${number((server.utilization ?? 0) * 100, 0)} %`),
    gauge(server.memory_total ? server.memory_used / server.memory_total : null, bytes(server.memory_used)),
    server.power_w === null || server.power_w === undefined ? "unknown" : `${number(server.power_w)} W (${server.energy_source})`,
  ]));
}

function showWidths(widths) {
  const total = Object.values(widths).reduce((sum, count) => sum + count, 0);
  const order = Object.entries(widths).sort((a, b) => b[1] - a[1]);
  const shown = order.slice(0, 8);
  const rest = order.slice(8).reduce((sum, entry) => sum + entry[1], 0);
  if (rest) shown.push([`${order.length - 8} more`, rest]);
  rows("widths", shown.map(([name, count]) => [name, number(count, 0), `${number((100 * count) / total, 1)} %`]));
  byId("width-bar").replaceChildren(...shown.map(([, count], i) =>
    node("span", "", { class: `c${i % 4}`, style: `flex: ${count}; opacity: ${1 - 0.35 * Math.floor(i / 4)}` })));
}

function showPasses(model) {
  byId("passes").hidden = !model.margins;
  if (!model.margins) return;
  const total = model.margins.reduce((sum, count) => sum + count, 0);
  const most = Math.max(...model.margins);
  const again = `${number((100 * model.second_passes) / Math.max(total, 1), 1)} %`;
  text("again", again);
  byId("margins").setAttribute("aria-label", `${again} ran again; share of first answers by margin, from 0 to 1: ` +
    model.margins.map((count) => `${number((100 * count) / total, 0)} %`).join(", "));
  byId("margins").replaceChildren(...model.margins.map((count) => node("span", "", { style: `height: ${(100 * count) / most}%` })));
  if (Date.now() - boundAsked > BOUND_MS) loadBound(model);
}

async function loadBound(model) {
  boundAsked = Date.now();
  let found = {};
  try {
    const response = await fetch(`/live/bound/${encodeURIComponent(model.name)}`, { headers: headers() });
    if (response.ok) found = await response.json();
  } catch { return; } // the stream says that the server is away
  const hulls = Object.entries(found.hulls || {}).filter(([, hull]) => hull.length);
  byId("bound").hidden = !hulls.length;
  if (!hulls.length) return;
  const lines = hulls.map(([, hull]) => [hull.map((at) => at[0] * 1e3), hull.map((at) => at[1] * 100)]);
  // The bound counts all that the devices take, also at rest, and so must the point: not the batches' energy alone.
  const watts = model.servers.map((server) => server.power_w ?? NaN).reduce((sum, power) => sum + power, 0);
  const known = Number.isFinite(watts) && model.throughput > 0 && model.expected_accuracy !== null;
  if (known) lines.push([[(1e3 * watts) / model.throughput], [model.expected_accuracy * 100]]);
  const names = [...hulls.map(([name]) => `least at ${number(found.load_items_s)} items/s, ${name}`), ...(known ? ["now"] : [])];
  byId("bound-key").replaceChildren(...names.map((name, i) => {
    const key = node("span", node("i", "", { class: `c${i % 4}` }));
    key.append(name);
    return key;
  }));
  byId("chart-bound").setAttribute("aria-label", names.join(", "));
  charts.bound?.destroy();
  const axis = { stroke: () => getComputedStyle(document.body).color, grid: { stroke: "rgba(128,128,128,.25)" }, ticks: { show: false }, font: "12px system-ui" };
  charts.bound = new uPlot({
    width: Math.max(byId("chart-bound").clientWidth, 200), height: 150, legend: { show: false }, cursor: { show: false },
    scales: { x: { time: false, range: (_, low, high) => [low - 0.05 * (high - low + 1), high + 0.05 * (high - low + 1)] },
      y: { range: (_, low, high) => [low - 0.1 * (high - low + 0.1), high + 0.1 * (high - low + 0.1)] } },
    series: [{}, ...lines.map((_, i) => {
      const dot = known && i === lines.length - 1;
      return { stroke: () => colour(i), fill: undefined, width: 2, spanGaps: true, points: { show: dot, size: 9, fill: () => colour(i) } };
    })],
    axes: [{ ...axis, space: 60 }, { ...axis, size: 48 }],
  }, uPlot.join(lines), byId("chart-bound"));
}

function showRouter(model) {
  rows("decisions", ["server", "width", "group"].map((head) => {
    const choices = Object.entries(model.decisions[head]).sort((a, b) => b[1] - a[1]).slice(0, 6);
    const total = Object.values(model.decisions[head]).reduce((sum, count) => sum + count, 0);
    return [head, choices.map(([choice, count]) => `${choice}: ${number((100 * count) / total, 0)} %`).join(", ") || "none yet"];
  }));
  text("fallbacks", number(model.fallbacks, 0));
  text("suspensions", number(model.suspensions, 0));
  text("reasons", model.reasons.length ? `Why: ${model.reasons.join("; ")}.` : "");
}

const bytes = (size) => (size === undefined ? "unknown" : size < 2 ** 20 ? `${number(size / 2 ** 10)} KiB` : size < 2 ** 30 ? `${number(size / 2 ** 20)} MiB` : `${number(size / 2 ** 30)} GiB`);
const duration = (s) => (s < 120 ? `${Math.floor(s)} s` : s < 7200 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h`);

// ---- charts

function draw(model) {
  const models = history.map((sample) => sample.models.find((other) => other.name === model.name));
  const times = history.map((sample) => sample.time);
  plot("throughput", [times, models.map((one) => one?.throughput ?? null)], `${number(model.throughput)} items per second now`);
  plot("latency", [times, models.map((one) => one?.p50_ms ?? null), models.map((one) => one?.p99_ms ?? null)],
    `50th percentile ${number(model.p50_ms)} ms, 99th ${number(model.p99_ms)} ms now`);
  const names = model.servers.map((server) => server.name);
  const of = (one, name) => one?.servers.find((server) => server.name === name)?.utilization;
  plot("utilisation", [times, ...names.map((name) => models.map((one) => { const u = of(one, name); return u === null || u === undefined ? null : u * 100; }))],
    names.map((name, i) => `${name} ${number((model.servers[i].utilization ?? 0) * 100, 0)} %`).join(", "));
  byId("utilisation-key").replaceChildren(...names.flatMap((name, i) => [node("i", "", { class: `c${i % 4}` }), name]));
}

function plot(name, data, words) {
  const place = byId(`chart-${name}`);
  place.setAttribute("aria-label", words);
  let chart = charts[name];
  if (!chart || chart.series.length !== data.length) {
    chart?.destroy();
    const axis = { stroke: () => getComputedStyle(document.body).color, grid: { stroke: "rgba(128,128,128,.25)" }, ticks: { show: false }, font: "12px system-ui" };
    chart = charts[name] = new uPlot({
      width: Math.max(place.clientWidth, 200), height: 150, legend: { show: false }, cursor: { show: false },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      series: [{}, ...data.slice(1).map((_, i) => ({ stroke: () => colour(i), width: 2, points: { show: false } }))],
      axes: [{ ...axis, space: 60 }, { ...axis, size: 48 }],
    }, data, place);
  } else {
    chart.setData(data);
  }
}

function resize() {
  for (const [name, chart] of Object.entries(charts)) chart.setSize({ width: Math.max(byId(`chart-${name}`).clientWidth, 200), height: 150 });
}
addEventListener("resize", resize);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Object.values(charts).forEach((chart) => chart.redraw()));

// ---- try it

async function loadCard(name) {
  card = { name }; // asked for once
  const [metadata, config] = await Promise.all([`/v2/models/${name}`, `/v2/models/${name}/config`].map(
    async (path) => (await fetch(path, { headers: headers() })).json()));
  card = { name, shape: metadata.inputs[0].shape.slice(1), format: config.input[0].format };
  const widths = config.parameters.widths.string_value.split(",");
  byId("width").replaceChildren(node("option", "the router decides", { value: "" }), ...widths.map((width) => node("option", width, { value: width })));
  paint(null);
}

const sides = () => {
  const [a, b, c] = card.shape;
  return card.format === "FORMAT_NHWC" ? { channels: c, height: a, width: b } : { channels: a, height: b, width: c };
};

function paint(picture) {
  const { height, width } = sides();
  const small = node("canvas", undefined, { width, height });
  const context = small.getContext("2d");
  if (picture) {
    const side = Math.min(picture.width, picture.height); // the middle square
    context.drawImage(picture, (picture.width - side) / 2, (picture.height - side) / 2, side, side, 0, 0, width, height);
  } else { // a stroke, so that there is something to ask before a picture was chosen
    context.fillRect(0, 0, width, height);
    context.strokeStyle = "white";
    context.lineWidth = Math.max(1, width / 8);
    context.beginPath();
    context.moveTo(width / 2, height * 0.15);
    context.lineTo(width / 2, height * 0.85);
    context.stroke();
  }
  card.pixels = context.getImageData(0, 0, width, height).data;
  const seen = byId("seen").getContext("2d");
  seen.imageSmoothingEnabled = false;
  seen.drawImage(small, 0, 0, 96, 96);
}

byId("picture").addEventListener("change", async (event) => {
  const file = event.target.files[0];
  text("picture-name", file ? file.name : "none yet: a stroke");
  if (!file || !card?.shape) return;
  try { paint(await createImageBitmap(file)); } catch { say("This file is not a picture that the browser can read.", true); }
});

function tensor() {
  const { channels, height, width } = sides();
  const size = height * width;
  const data = new Array(channels * size);
  for (let i = 0; i < size; i++) {
    const rgb = [0, 1, 2].map((c) => card.pixels[4 * i + c]);
    const values = channels === 1 ? [Math.round(0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2])] : rgb;
    for (let c = 0; c < channels; c++) data[card.format === "FORMAT_NHWC" ? i * channels + c : c * size + i] = values[c];
  }
  return data;
}

// What each pass ran at and cost; `other_` is of the one that did not answer, the rest of both.
function passes(cost) {
  const other = [cost.other_widths, cost.other_compute_ms, cost.other_energy_j];
  const answered = [cost.widths, cost.compute_ms - cost.other_compute_ms, cost.energy_j - cost.other_energy_j];
  const list = node("ul");
  (cost.passes === 2 ? [other, answered] : [answered, other]).forEach(([widths, ms, joules], i) => list.append(node("li",
    `${i ? "second" : "first"} pass${cost.passes === i + 1 ? ", the answer" : ""}: widths ${widths}, ${number(ms)} ms` +
    (cost.energy_j === undefined ? "" : `, ${number(joules * 1e3)} mJ`))));
  return list;
}

function say(words, wrong) {
  byId("answer").replaceChildren(node("p", words, wrong ? { class: "error" } : {}));
}

byId("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!card?.pixels) return;
  const parameters = {};
  if (byId("width").value) parameters.width = Number(byId("width").value);
  if (byId("deadline").value) parameters.deadline_ms = Number(byId("deadline").value);
  if (byId("floor").value) parameters.accuracy_floor = Number(byId("floor").value) / 100;
  if (byId("sure").value) parameters.confidence_floor = Number(byId("sure").value) / 100;
  const body = {
    inputs: [{ name: "image", datatype: "UINT8", shape: [1, ...card.shape], data: tensor() }],
    outputs: [{ name: "logits", parameters: { classification: 3 } }],
    parameters,
  };
  try {
    const response = await fetch(`/v2/models/${card.name}/infer`, {
      method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(body) });
    const reply = await response.json();
    if (!response.ok) { say(reply.error, true); return; }
    const cost = reply.parameters;
    const list = node("ol");
    for (const label of reply.outputs[0].data) {
      const [value, index, ...name] = label.split(":");
      list.append(node("li", `${name.join(":") || `class ${index}`} (logit ${number(Number(value), 2)})`));
    }
    const joules = cost.energy_j === undefined ? "energy unknown" : `${number(cost.energy_j * 1e3)} mJ (${cost.energy_source})`;
    const sure = cost.confidence === undefined ? "" : `, ${number(cost.confidence * 100, 1)} % sure`;
    byId("answer").replaceChildren(list, node("p",
      `widths ${cost.widths} on ${cost.servers}${sure}; waited ${number(cost.queue_ms)} ms, computed ${number(cost.compute_ms)} ms, ${joules}`),
      ...(cost.other_widths ? [passes(cost)] : []));
  } catch { say("The server did not answer.", true); }
});

follow();
