#!/usr/bin/env bash
# lm_eval 0.4.13: log-likelihoods of a BF16 model are multiples of up to 2 nats, so that answers tie and the first wins.
#
# A multiple-choice task takes the answer whose tokens have the largest sum of log-probabilities. So one may expect that
# sum to be exact to some hundredths of a nat. HFLM loads a model in the dtype of its checkpoint, and takes the softmax
# and the sum in it. In BF16 a sum near 300 is a multiple of 2, one near 80 of 0.5. Answers that are nearer than that
# tie, and argmax takes the first. The longer the answers are, the more of them are decided by their order. Perplexities
# and bits per byte are made of such sums, too. Nothing warns. FP16 has 8 times the digits. softmax_dtype="float32",
# which pull request 2921 brought, is right.
#
# Seen with lm_eval 0.4.13, transformers 5.24.0, torch 2.13.0 and Python 3.11 on a CPU, 2026-11-30. A small random Llama
# chooses among four answers of random words, 100 times for each length. The largest error of a log-likelihood in nats,
# against FP64 on the model's own BF16 logits; how often the best answers tie, and how often another one is chosen:
#
#   10 words, softmax_dtype=None: error 0.36, 8 ties, 2 other answers
#   10 words, softmax_dtype=float32: error 0.00, 0 ties, 0 other answers
#   40 words, softmax_dtype=None: error 1.08, 20 ties, 12 other answers
#   40 words, softmax_dtype=float32: error 0.02, 0 ties, 0 other answers
#   100 words, softmax_dtype=None: error 2.24, 30 ties, 19 other answers
#   100 words, softmax_dtype=float32: error 0.00, 0 ties, 0 other answers
#
# Exits with 1 if the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "lm_eval[hf]==0.4.13" transformers==5.24.0 torch==2.13.0
cat > "$folder/program.py" <<'PY'
import logging
import random

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS, ASKED, CHOICES = 1000, 8, 4
logging.disable(logging.CRITICAL)
torch.set_num_threads(1)
torch.manual_seed(0)
draws = random.Random(0)
numbers = {"<end>": 0} | {f"word{number}": number for number in range(1, WORDS)}
plain = Tokenizer(models.WordLevel(numbers, unk_token="<end>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
special = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<end>")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **special)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=WORDS, initializer_range=0.1, bos_token_id=0, eos_token_id=0, **sizes)
model = LlamaForCausalLM(config).eval().bfloat16()


def text(length):
    return " ".join(f"word{draws.randrange(1, WORDS)}" for _ in range(length))


@torch.no_grad()
def right(asked, answer):
    tokens = tokenizer(asked + answer, return_tensors="pt")["input_ids"]
    logarithms = model(tokens).logits[:, ASKED - 1 : -1].double().log_softmax(-1)
    return logarithms.gather(-1, tokens[:, ASKED:, None]).sum().item()


seen = {}
for length in (10, 40, 100):
    questions = [(text(ASKED), [" " + text(length) for _ in range(CHOICES)]) for _ in range(100)]
    pairs = [(asked, answer) for asked, answers in questions for answer in answers]
    exact = torch.tensor([right(*pair) for pair in pairs], dtype=torch.float64).view(-1, CHOICES)
    for dtype in (None, "float32"):
        evaluated = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, softmax_dtype=dtype)
        requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        found = [sum_ for sum_, _ in evaluated.loglikelihood(requests, disable_tqdm=True)]
        found = torch.tensor(found, dtype=torch.float64).view(-1, CHOICES)
        ties = ((found == found.amax(1, keepdim=True)).sum(1) > 1).sum().item()
        changed = (found.argmax(1) != exact.argmax(1)).sum().item()
        seen[length, dtype] = (found - exact).abs().max().item(), ties, changed
        told = "{} words, softmax_dtype={}: error {:.2f}, {} ties, {} other answers"
        print(told.format(length, dtype, *seen[length, dtype]))
same = seen[40, None][0] > 0.5 and seen[40, None][1] > 10 and seen[100, None][1] > 15 and seen[100, None][2] > 8
sound = all(seen[length, "float32"][0] < 0.1 and seen[length, "float32"][1] == 0 for length in (10, 40, 100))
raise SystemExit(0 if same and sound else "changed")
PY
export HF_HUB_OFFLINE=1
"$folder/venv/bin/python" -W ignore "$folder/program.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
