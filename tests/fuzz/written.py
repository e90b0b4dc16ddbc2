"""``flashpoint VERB`` as it is, training included; only pictures are not drawn."""

from typing import Any

from flashpoint.cli.main import main
from flashpoint.cli.process import own_streams
from flashpoint.lab.report import page

if __name__ == "__main__":
    drawn: Any = lambda _runs: {panel: page.Image(b"picture", 1) for panel in page.PANELS[:3]}  # noqa: E731
    page._images = drawn
    own_streams()
    main()
