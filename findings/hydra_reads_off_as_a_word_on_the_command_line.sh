#!/usr/bin/env bash
# hydra-core 1.3.8: compile=off on the command line is the word "off", which is true, where the file's off is false.
#
# An override sets a key to what the file could have set it to. So one may expect compile=off to be compile: off. The
# file is YAML 1.1, where on, off, yes and no are truth values, 010 is 8, 0x10 is 16 and .inf is infinity. The command
# line has a grammar of its own: true and false alone are truth values, inf is infinity, and all else is a word. A
# config without types keeps the word, and `if config.compile:` takes it for true: the run compiles, shuffles or resumes
# because one has asked it not to. The printed config shows 'off' in quotes. A typed config turns the word into False.
# So write true and false, or give configs types.
#
# Seen with hydra-core 1.3.8, omegaconf 2.3.1 and Python 3.11, 2026-11-30:
#
#   off: file False, command line 'off', which is true
#   no: file False, command line 'no', which is true
#   false: file False, command line False
#   010: file 8, command line '010'
#   0x10: file 16, command line '0x10'
#   1:30: file 90, command line '1:30'
#   .inf: file inf, command line '.inf'
#   inf: file 'inf', command line inf
#   1e-4: file 0.0001, command line 0.0001
#   off, with a type of bool: command line False
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet hydra-core==1.3.8 omegaconf==2.3.1
cat > "$folder/program.py" <<'PY'
import sys
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

folder = Path(sys.argv[1]) / "configs"
folder.mkdir()


@dataclass
class Typed:
    compile: bool = True


ConfigStore.instance().store(name="typed", node=Typed)
found = {}
with initialize_config_dir(str(folder), version_base="1.3"):
    for written in ("off", "no", "false", "010", "0x10", "1:30", ".inf", "inf", "1e-4"):
        (folder / "of_file.yaml").write_text(f"compile: {written}\n")
        file = compose("of_file").compile
        line = compose("of_file", overrides=[f"compile={written}"]).compile
        opposite = ", which is true" if bool(line) != bool(file) else ""
        found[written] = (file, line)
        print(f"{written}: file {file!r}, command line {line!r}{opposite}")
    typed = compose("typed", overrides=["compile=off"]).compile
print(f"off, with a type of bool: command line {typed!r}")
same = found == {
    "off": (False, "off"), "no": (False, "no"), "false": (False, False), "010": (8, "010"), "0x10": (16, "0x10"),
    "1:30": (90, "1:30"), ".inf": (float("inf"), ".inf"), "inf": ("inf", float("inf")), "1e-4": (1e-4, 1e-4),
}
raise SystemExit(0 if same and typed is False else "changed")
PY
"$folder/venv/bin/python" "$folder/program.py" "$folder"
