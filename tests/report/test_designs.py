"""The figure of accuracy over multiply-adds."""

from slim_scheduler.report.designs import draw, shipped
from tests.cli.conftest import ROOT


def test_the_figure_is_of_the_shipped_network_and_names_whose_figures_are_whose(tmp_path):
    path = tmp_path / "designs.svg"
    draw(shipped(ROOT / "models"), path)
    text = path.read_text()
    assert "cifar100, its teacher from ImageNet" in text
    assert "the same without a teacher" in text
    assert "the paper, table I" in text
    assert "MobileNetV2 x0.5 to x1.4, trained separately" in text
    assert text.count("<use ") >= 256
