import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;

/** Two inferences with Java's own client, which offers HTTP/2 with every first request: URL, body, JSON length, reply. */
public class JavaClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
            .header("Inference-Header-Content-Length", arguments[2])
            .POST(HttpRequest.BodyPublishers.ofFile(Path.of(arguments[1])))
            .build();
        for (int turn = 0; turn < 2; turn++) {
            HttpResponse<byte[]> response = client.send(request, HttpResponse.BodyHandlers.ofByteArray());
            System.out.println(response.statusCode() + " " + response.version());
            Files.write(Path.of(arguments[3]), response.body());
        }
    }
}
