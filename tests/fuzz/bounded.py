"""``flashpoint VERB`` with limits of 2 MB, in place of those of files that nobody has so large."""

from flashpoint import files
from flashpoint.cli import diagnose_inputs
from flashpoint.lab.analysis import listed
from flashpoint.lab.evidence import tables
from flashpoint.logs import log
from tests.fuzz import verb

_MOST_MB = 2

if __name__ == "__main__":
    files.content.__defaults__ = (_MOST_MB,)
    files._LARGEST_MB = diagnose_inputs._MOST_MB = listed._MOST_MB = log._MOST_MB = _MOST_MB
    tables._LARGEST_BYTES = 30 * 10**6
    verb.run()
