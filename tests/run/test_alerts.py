"""run/alerts.py: what a reader of the curves would notice, once."""

import math

from run.alerts import Alerts


def losses(alerts, values, first=0):
    return [alert for n, loss in enumerate(values, first) for alert in alerts.check({"iter": n, "iter/loss": loss})]


def test_a_spike_is_reported_once():
    alerts = Alerts()
    assert losses(alerts, [4.0 - 0.01 * n for n in range(60)]) == []
    (alert,) = losses(alerts, [6.0, 6.1, 6.0, *[6.0 - 0.01 * n for n in range(60)]], first=60)
    assert alert.title == "Loss spike"
    assert "iteration 60 is 6.0000" in alert.text


def test_noise_decay_and_the_first_losses_are_no_spikes():
    noisy = [3.0 + 0.3 * math.sin(7 * n) for n in range(200)]
    assert losses(Alerts(), noisy) == []
    assert losses(Alerts(), [11.0 * 0.98**n for n in range(200)]) == []
    assert losses(Alerts(), [1.0, 11.0, 4.0]) == []
    assert losses(Alerts(), [2.0] * 60 + [2.1] * 60) == [], "less than 10 %, though there was no noise at all"
    assert losses(Alerts(), [2.0] * 60 + [math.nan] * 60 + [2.0]) == [], "the guard reports it"


def lags(alerts, measurements, step_ms=100.0):
    events = [
        {"iter": n, "time/slowest_rank": rank, "time/rank_spread_ms": spread, "time/step_ms": step_ms}
        for n, (rank, spread) in enumerate(measurements)
    ]
    return [alert for event in events for alert in alerts.check(event)]


def test_a_rank_that_lags_is_reported_once_and_again_when_it_lags_again():
    alerts = Alerts()
    assert lags(alerts, [(3, 40.0)] * 4) == []
    (alert,) = lags(alerts, [(3, 40.0)] * 9)
    assert alert == ("A rank lags", "at iteration 0, rank 3 computes 40 ms longer than the fastest rank in a step of 100 ms")
    assert lags(alerts, [(3, 10.0)]) == []
    assert len(lags(alerts, [(3, 40.0)] * 9)) == 1


def test_ranks_in_turn_or_a_small_spread_are_no_lag():
    assert lags(Alerts(), [(n % 2, 40.0) for n in range(20)]) == []
    assert lags(Alerts(), [(1, 20.0)] * 20) == []
    assert Alerts().check({"iter": 0, "val/loss": 1.0}) == []
