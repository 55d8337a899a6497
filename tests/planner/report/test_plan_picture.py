"""`plan --report F.svg`: a picture that a page can show as it is."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from yuan_train.cli.main import main


def test_the_picture_has_each_card_and_its_row_of_the_timeline(tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    words = ["--cluster", "laptop", "--config", "configs/run/tiny.yaml", "search.effort=quick"]
    assert main(["plan", *words, "--report", str(out)]) == 0
    root = ET.parse(out).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0].startswith("Plan for tiny on laptop: ") and texts[0].endswith(" a step")
    for card in ("full/0", "half/0", "quarter/0"):
        assert any(text == card for text in texts) and any(
            text.startswith("p0 s") and card in text for text in texts
        )
