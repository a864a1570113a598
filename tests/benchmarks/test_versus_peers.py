"""The page about the peers is computed from the figures and names where a peer is ahead."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.model import DBOS, OURS_LEDGER, OURS_REDIS, PGQUEUER, Results
from benchmarks.stages.rivals import Killed, Rivals, RivalsLatency
from benchmarks.versus import ahead, main, merged, page, targets

MEASURES = [*Rivals.measures, *RivalsLatency.measures, *Killed.measures]


def run(**figures: dict[str, float]) -> Results:
    results = Results("2026-11-16T00:00:00+00:00", {"cores": "2"}, {})
    stores = {"huey": "Redis", PGQUEUER: "PostgreSQL", DBOS: "PostgreSQL"}
    peer = {"version": "1", "settings": "s", "bulk": "b", "slow": "s", "tuned": ""}
    results.settings["field"] = {side: {**peer, "store": store} for side, store in stores.items()}
    for measure, sides in figures.items():
        for side, value in sides.items():
            results.add(measure.replace("_", "."), side, 1, value)
    results.summarise(MEASURES)
    return results


def test_targets_are_judged_by_the_figures() -> None:
    results = run(
        peers_1={OURS_REDIS: 30_000, "huey": 4_000, PGQUEUER: 16_000},
        peers_bulk={OURS_REDIS: 90, "huey": 100},
        latency_p50={OURS_REDIS: 1.0, "huey": 0.5},
        kill_lost={OURS_REDIS: 0, OURS_LEDGER: 1},
        kill_seconds={OURS_REDIS: 31.5, OURS_LEDGER: 33},
    )
    verdicts = {target.what: (target.measured, target.text) for target in targets(results)}
    assert verdicts["drain, 1 worker, × the fastest peer on Redis"] == (7.5, "met; the aim of 9 × not")
    assert verdicts["drain, 1 worker, × pgqueuer"] == (1.875, "**not met**")
    assert verdicts["submit in bulk, × the fastest peer"] == (0.9, "**not met** (a tie: within 30 %)")
    assert verdicts["latency p50, the best peer's ÷ ours"] == (0.5, "**not met**")
    assert verdicts["latency p99, the best peer's ÷ ours"] == (None, "not measured")
    assert verdicts[f"killed with -9, {OURS_REDIS}: jobs lost"] == (0, "met")
    assert verdicts[f"killed with -9, {OURS_LEDGER}: jobs lost"] == (1, "**not met**")
    assert verdicts[f"killed with -9, {OURS_REDIS}: until all are done"] == (31.5, "met")
    assert verdicts[f"killed with -9, {OURS_LEDGER}: until all are done"] == (33, "**not met**")


def test_a_peer_that_is_ahead_is_named_for_rates_and_latencies() -> None:
    results = run(
        peers_single={OURS_REDIS: 4_000, "huey": 8_000, PGQUEUER: 500},
        latency_p50={OURS_REDIS: 1.0, "huey": 0.9, DBOS: 16.0},
        kill_begun={OURS_REDIS: 10, "huey": 0},
        peers_bulk={OURS_REDIS: 100_000, "huey": 8_000},
        # Behind one side of holdfast, and far ahead of the other.
        peers_1={OURS_REDIS: 50_000, OURS_LEDGER: 1_000, "huey": 2_000, PGQUEUER: 18_000},
    )
    one_by_one, drain, latency = ahead(results)
    assert "submit one by one" in one_by_one
    assert "huey 8,000 (2.00 ×)" in one_by_one
    assert PGQUEUER not in one_by_one
    assert f"{PGQUEUER} 18,000 (18.00 ×), huey 2,000 (2.00 ×) against 1,000 of {OURS_LEDGER}" in drain
    assert "huey 0.90 (1.11 ×, a tie)" in latency
    assert DBOS not in latency


def test_the_page_has_every_side_and_every_failure() -> None:
    results = run(peers_1={OURS_REDIS: 30_000, "huey": 3_000}, kill_begun={OURS_REDIS: 10, "huey": 5})
    results.failures.append("rq: (not installed: no wheel)\nmore")
    results = merged([results, run(peers_single={OURS_REDIS: 5_970, "huey": 10_000})])
    text = page([results], ["peers-drain.svg"])
    # Not rounded: 0.6 would look as if the target were met.
    assert "| 0.6 × | 0.597 × | **not met** |" in text
    assert "| huey | 10,000 (1.68 ×) | 3,000 (0.10 ×) |" in text
    # Not compared, so there is no ratio.
    assert "| huey | 5 |" in text
    assert "![peers-drain](peers-drain.svg)" in text
    assert "- rq: (not installed: no wheel)" in text
    assert "more" not in text.splitlines()


def test_several_runs_are_merged() -> None:
    first = run(peers_1={OURS_REDIS: 1, "huey": 2}, peers_2={OURS_REDIS: 5})
    last = run(peers_2={OURS_REDIS: 3})
    last.began_at = "2026-11-17T00:00:00+00:00"
    merged_results = merged([first, last])
    assert {(each.measure, each.median) for each in merged_results.summaries} == {
        ("peers.1", 1),
        ("peers.1", 2),
        ("peers.2", 3),
    }
    text = page([first, last], [])
    # Every run is shown with its date.
    assert f"Run of {first.began_at}" in text
    assert f"Run of {last.began_at}" in text
    assert "comes from the last of them" in text


def test_the_saved_samples_of_a_page_reproduce_the_page(tmp_path: Path) -> None:
    results = run(peers_single={OURS_REDIS: 1, "huey": 4}, peers_1={OURS_REDIS: 3, "huey": 2})
    results.latencies_ms["huey"] = [1.0, 2.0]
    first, again = tmp_path / "run.json", tmp_path / "page.json"
    first.write_bytes(msgspec.json.encode(results))
    page_file = tmp_path / "page.md"
    assert main([str(first), "--page", str(page_file)]) == 0
    first_page = page_file.read_text()
    assert b"latencies_ms" in again.read_bytes()
    assert not msgspec.json.decode(again.read_bytes(), type=Results).latencies_ms
    assert main([str(again), "--page", str(page_file)]) == 0
    assert page_file.read_text() == first_page
