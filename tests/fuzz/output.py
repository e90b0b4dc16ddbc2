"""``output.py HOW VERB …``: a verb whose output is broken in some way, or written in another encoding.

What it must not do is told on the stderr that this process began with: raise, end with an odd status, or send a
terminal what is not printable.
"""

import io
import os
import runpy
import sys
import traceback
from pathlib import Path

from flashpoint.cli.process import own_streams

BROKEN = {
    "closed": (1, 2),
    "no stdout": (1,),
    "no stderr": (2,),
    "readers gone": (1, 2),
    "reader gone": (1,),
    "full": (1, 2),
}
"""The way, and the descriptors that it breaks."""
ENCODINGS = ("utf-8", "ascii", "latin-1")
_SIGPIPE = 141


def connect(how: str) -> None:
    """Give this process the streams of a new one."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout = sys.stderr = None
    if how.startswith("reader"):
        reader, writer = os.pipe()
        os.close(reader)
    elif how == "full":
        writer = os.open("/dev/full", os.O_WRONLY)
    for number in BROKEN.get(how, ()):
        if how in ("closed", "no stdout", "no stderr"):
            os.close(number)
        else:
            os.dup2(writer, number)
    encoding = how if how in ENCODINGS else "utf-8"
    for number, name in ((1, "stdout"), (2, "stderr")):
        if how not in ("closed", f"no {name}"):
            setattr(sys, name, io.TextIOWrapper(open(number, "wb", closefd=False), encoding))  # noqa: SIM115


def main() -> None:
    begun = os.dup(2), *(Path(os.readlink(f"/proc/self/fd/{number}")) for number in (1, 2))
    kept, *texts = begun
    how = sys.argv.pop(1)
    connect(how)
    own_streams()
    status: object = 0
    try:
        runpy.run_path(str(Path(__file__).with_name("verb.py")), run_name="__main__")
        sys.stdout.flush()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        os.write(kept, traceback.format_exc().encode(errors="backslashreplace"))
        os._exit(1)
    broken = BROKEN.get(how, ())
    shown = "".join(
        text.read_text("latin-1" if how == "latin-1" else "utf-8") for text in texts if not broken and how in ENCODINGS
    )
    if odd := {one for one in shown if not one.isprintable()} - set("\n\r"):
        os.write(kept, f"Traceback (most recent call last): a terminal was sent {sorted(odd)!a}\n".encode())
        os._exit(1)
    if (status == _SIGPIPE and 1 in broken and how.startswith("reader")) or (status in (0, 1, 2) and 2 in broken):
        status = 0
    os._exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
