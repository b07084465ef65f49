"""What all tests of evaluations have in common."""

import pytest


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    """Figures and page take longer than these runs."""
    monkeypatch.setattr("locret_kit.evals.report.write_page", lambda out: out / "report.html")
