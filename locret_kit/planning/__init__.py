"""Memory of a run before it is run: sizes, plans, and the largest setting that fits."""


def duration(seconds: float) -> str:
    """A time in its largest fitting unit: "40 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
