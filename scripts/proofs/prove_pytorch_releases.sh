#!/usr/bin/env bash
# Installs flashpoint, without an extra, beside several releases of PyTorch, and runs on the CPU what is to work there:
# the examples that are no trainer of ours, a diagnosis, the tests of users' own runs and those of the reference.
#
#   scripts/proofs/prove_pytorch_releases.sh FOLDER [VERSION …]    # some 5 GB and ten minutes a version; PyPI's have CUDA
#
# FOLDER gets a virtual environment and the logs of each version; an environment that is there is used again. Tests of
# kernels, which run in Triton's interpreter, are left out where Triton is older than 3.6; tests that need the
# laboratory, by what they import or by their marker, are left out everywhere. Skipped tests tell why in the logs. The
# last lines are a Markdown table. The status is 1 where something failed.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mkdir -p "${1:?give a folder for the environments}" && cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- 2.6.0 2.9.1 2.13.0 2.14.1 2.15.0
cd "$repository"
unset PYTHONPATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
own_run=(tests/watching tests/diagnosis tests/cli/test_diagnose.py tests/cli/test_diagnose_advice.py
  tests/test_detector.py tests/test_early_warning.py tests/test_other_softmax.py tests/test_quantiles.py tests/test_user_code.py)
reference=(tests/numerics tests/test_drop_in.py tests/test_drop_in_transformers.py tests/test_drop_in_use.py)
kernels='^import triton|numerics import .*launch|from flashpoint_kernels\.(rounding|residual)|numerics\.(compilations|test_kernels)'
laboratory='^from flashpoint\.lab|^from tests\.(composed|records)|^from (hydra|pyarrow)'

frozen() { "$1/bin/pip" freeze | { grep -E '^(torch|triton)' || true; }; }

table=("| PyTorch | Triton | unchanged by pip | examples | own run: passed | reference: passed | failed | skipped | date |"
  "|---|---|---|---|---|---|---|---|---|")
status=0
for version in "$@"; do
  environment=$folder/$version
  logs=$folder/$version-logs
  mkdir -p "$logs"
  if [ ! -d "$environment" ]; then
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --no-cache-dir "torch==$version" numpy
  fi
  python=$environment/bin/python

  before=$(frozen "$environment")
  "$environment/bin/pip" install --quiet --no-cache-dir "$repository"
  "$environment/bin/pip" install --quiet --no-cache-dir --no-deps --force-reinstall "$repository"  # these sources
  unchanged=yes
  [ "$before" = "$(frozen "$environment")" ] || { unchanged=no; status=1; }
  triton=$(sed -n 's/^triton==//p' <<< "$before")

  # The examples, and what the light installation says of them; Transformers is what the third one imports.
  rm -rf "$logs/work" && mkdir "$logs/work"
  set +e  # in a condition the first failure would not end the subshell
  (
    set -e
    cd "$logs/work"
    "$python" "$repository/examples/plain_pytorch.py" attention=flash_exact_rowsum name=drop-in epochs=1 waves=32
    "$python" "$repository/examples/plain_pytorch.py"
    "$environment/bin/flashpoint" diagnose runs/plain
    "$environment/bin/flashpoint" runs runs/plain
    "$environment/bin/flashpoint" watch --once runs/plain
    "$python" "$repository/examples/nanogpt.py" steps=8
    if "$environment/bin/flashpoint" survival runs/plain; then exit 1; fi  # in one line
    "$environment/bin/pip" install --quiet --no-cache-dir 'transformers>=5,<6'
    "$python" "$repository/examples/transformers_gpt2.py" steps=8
  ) > "$logs/examples.txt" 2>&1
  examples=$?
  set -e
  if [ "$examples" = 0 ]; then examples=works; else examples=fails; status=1; fi

  "$environment/bin/pip" install --quiet --no-cache-dir pytest ml-dtypes scipy mpmath hypothesis
  left_out=()
  while IFS= read -r file; do
    if grep -qE "$laboratory" "$file"; then left_out+=("--ignore=$file"); fi
    if [ "$(printf '3.6\n%s\n' "${triton:-0}" | sort -V | head -1)" != 3.6 ] && grep -qE "$kernels" "$file"; then
      left_out+=("--ignore=$file")
    fi
  done < <(find "${own_run[@]}" "${reference[@]}" -name '*.py')
  counts=()
  failed=0
  skipped=0
  for part in own_run reference; do
    declare -n tests=$part
    "$python" -m pytest -o addopts= -p no:logging -p no:cacheprovider -q -rfEs --tb=short -m 'not exhaustive and not lab' \
      "${left_out[@]}" "${tests[@]}" > "$logs/$part.txt" 2>&1 || status=1
    summary=$({ grep -E ' in [0-9.]+s' "$logs/$part.txt" || true; } | tail -1)  # Triton writes more as the process ends
    counts+=("$(grep -oE '[0-9]+ passed' <<< "0 passed $summary" | tail -1 | cut -d' ' -f1)")
    skipped=$((skipped + $(grep -oE '[0-9]+ skipped' <<< "0 skipped $summary" | tail -1 | cut -d' ' -f1)))
    failed=$((failed + $(grep -cE '^(FAILED|ERROR) ' "$logs/$part.txt" || true)))
  done
  [ "$before" = "$(frozen "$environment")" ] || { unchanged=no; status=1; }
  table+=("| $version | ${triton:-none} | $unchanged | $examples | ${counts[0]} | ${counts[1]} | $failed | $skipped | $(date -I) |")
  echo "${table[-1]}"
done
printf '%s\n' "${table[@]}"
exit $status
