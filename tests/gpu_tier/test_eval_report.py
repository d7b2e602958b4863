"""Reports say what was measured, and that a figure is missing where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_tier.errors import ConfigError
from gpu_tier.eval.claims import CLAIMS, Status, claims_table
from gpu_tier.eval.plots import plot_lines
from gpu_tier.eval.report import ResultTable, write
from gpu_tier.eval.retrieval_claims import RETRIEVAL_CLAIMS, left_out_table


def test_a_table_is_markdown_and_json(tmp_path: Path) -> None:
    table = ResultTable("Rates", ("case", "rate"), (("a|b", 0.12345), ("c", None), ("d", 7)), "As measured.")
    write("Results", [table], tmp_path / "new", plots=("rates.svg",))
    text = (tmp_path / "new" / "report.md").read_text()
    assert "| a\\|b | 0.123 |" in text
    assert "| c | – |" in text
    assert "| d | 7 |" in text
    assert text.index("As measured.") < text.index("| case | rate |")
    assert "![rates](rates.svg)" in text
    stored = json.loads((tmp_path / "new" / "report.json").read_text())
    assert stored["tables"][0]["rows"][0] == ["a|b", 0.12345]


def test_a_row_with_a_cell_too_many_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have the 1 columns"):
        ResultTable("t", ("one",), ((1, 2),))


def test_every_claim_has_a_status_and_shows_our_figure_only_if_there_is_one() -> None:
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)
    table = claims_table({"hit_rate": "0.81"})
    shown = {row[1]: row for row in table.rows}
    measured = next(claim for claim in CLAIMS if claim.key == "hit_rate")
    assert shown[measured.claim][4] == "0.81"
    assert sum(row[4] is not None for row in table.rows) == 1
    assert {row[3] for row in (*table.rows, *claims_table({}, RETRIEVAL_CLAIMS).rows)} == {s.value for s in Status}


def test_claims_of_all_systems_have_keys_of_their_own_and_the_papers_baselines_are_named() -> None:
    keys = [claim.key for claim in (*CLAIMS, *RETRIEVAL_CLAIMS)]
    assert len(set(keys)) == len(keys)
    assert any("MagicPIG" in str(row[0]) for row in left_out_table().rows)


def test_a_plot_is_the_same_file_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = {"mid": {"quest": [(20.0, 0.9), (10.0, 0.6)], "oracle": [(10.0, 1.0), (20.0, 1.0)]}}
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        plot_lines(panels, "tokens", "recall", path, log_x=True)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert "recall" in paths[0].read_text()
