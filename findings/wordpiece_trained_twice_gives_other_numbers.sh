#!/usr/bin/env bash
# tokenizers 0.23.3: WordPiece and Unigram tokenizers that are trained twice on one text give its tokens other numbers.
#
# Training counts, and draws nothing by chance; a BPE or WordLevel tokenizer comes out the same each time. So one may
# expect that of the others, and train a tokenizer anew on each machine, or in each process of a training. WordPiece's
# trainer numbers the letters within words, such as ##a, as it meets them in a hash table that is seeded by chance, and
# pairs of equal counts merge in the order of their numbers, so that even the tokens differ. So does a BPE tokenizer's
# with continuing_subword_prefix. Unigram's trainer numbers tokens of equal score by chance. No seed fixes it. Processes
# that each train their own average the gradients of different tokens, and a checkpoint beside a tokenizer that was
# trained again reads noise. Nothing warns, and each run alone looks right. Train once, save the tokenizer beside the
# checkpoint, and load it everywhere. Issue 1794 of tokenizers reports the other tokens.
#
# Seen with tokenizers 0.23.3 and Python 3.11, 2026-11-30. Ten trainings of 150 tokens on the Zen of Python: the number
# of different vocabularies, of sets of tokens whatever their numbers, and of results for one line. The sets of
# WordPiece are three to seven:
#
#   BPE: 1 vocabulary, 1 set of tokens, 1 result
#   WordLevel: 1 vocabulary, 1 set of tokens, 1 result
#   WordPiece: 10 vocabularies, 4 sets of tokens, 10 results
#   Unigram: 10 vocabularies, 1 set of tokens, 10 results
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3
cat > "$folder/program.py" <<'PY'
import codecs
import contextlib
import io

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

RUNS = 10
OPTIONS = {"vocab_size": 150, "special_tokens": ["[UNK]"], "show_progress": False}
KINDS = {
    "BPE": (models.BPE, trainers.BpeTrainer, {}),
    "WordLevel": (models.WordLevel, trainers.WordLevelTrainer, {}),
    "WordPiece": (models.WordPiece, trainers.WordPieceTrainer, {}),
    "Unigram": (models.Unigram, trainers.UnigramTrainer, {"unk_token": "[UNK]"}),
}
with contextlib.redirect_stdout(io.StringIO()):
    import this
TEXT = codecs.decode(this.s, "rot13").splitlines()


def trained(kind):
    model, trainer, options = KINDS[kind]
    tokenizer = Tokenizer(model() if kind == "Unigram" else model(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXT, trainer(**OPTIONS, **options))
    return tokenizer


seen = {}
for kind in KINDS:
    runs = [trained(kind) for _ in range(RUNS)]
    vocabularies = {tuple(sorted(run.get_vocab().items())) for run in runs}
    tokens = {tuple(sorted(run.get_vocab())) for run in runs}
    results = {tuple(run.encode(TEXT[-1]).ids) for run in runs}
    seen[kind] = len(vocabularies), len(tokens), len(results)
    text = "{}: {} vocabular{}, {} set{} of tokens, {} result{}"
    ends = [("y", "ies")[seen[kind][0] > 1], *("s"[: number > 1] for number in seen[kind][1:])]
    print(text.format(kind, *(part for pair in zip(seen[kind], ends, strict=True) for part in pair)))
same = seen["BPE"] == seen["WordLevel"] == (1, 1, 1)
other = min(seen[kind][i] for kind in ("WordPiece", "Unigram") for i in (0, 2)) > 1
raise SystemExit(0 if same and other else "changed")
PY
"$folder/venv/bin/python" -W ignore "$folder/program.py"
