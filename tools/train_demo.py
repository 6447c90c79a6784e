"""Make the demo model: a small mixture-of-experts model that writes King James English.

From the King James Bible (public domain), as Debian's `bible` command prints it, this trains a
byte-level BPE tokenizer and transformers' `Qwen3MoeForCausalLM` on the CPU and makes a 4-bit MLX
checkpoint of it with mlx-lm, a whole folder. PyTorch, transformers and tokenizers are tools of
this script alone: the project does not depend on them. These commands made the folder, in half
an hour on one CPU core (--compile needs a C++ compiler; -P keeps the files beside this one from
hiding Python's own modules):

    apt-get install -y bible-kjv bible-kjv-text
    python3 -m venv env
    env/bin/pip install torch==2.13.0 transformers tokenizers 'mlx[cpu]>=0.32' 'mlx-lm>=0.32'
    bible -f gen1:1-rev22:21 > kjv.txt
    env/bin/python -P tools/train_demo.py --compile --text kjv.txt --work float --out demo_model

The float checkpoint stays in `--work`, for `--convert-only`; `--seed` fixes all random choices.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from mlx.nn.losses import cross_entropy
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

# The user's words are continued as plain text; a later user turn starts on a new line.
CHAT_TEMPLATE = (
    "{% for m in messages if m['role'] != 'system' %}"
    "{% if m['role'] == 'user' and not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ m['content'] }}{% endfor %}"
)
GENERATION = '{"do_sample": true, "eos_token_id": 0, "pad_token_id": 0, "temperature": 0.7}'
BOOKS = """Genesis, Exodus, Leviticus, Numbers, Deuteronomy, Joshua, Judges, Ruth, 1 Samuel, 2
Samuel, 1 Kings, 2 Kings, 1 Chronicles, 2 Chronicles, Ezra, Nehemiah, Esther, Job, Psalm, Proverbs,
Ecclesiastes, Song of Solomon, Isaiah, Jeremiah, Lamentations, Ezekiel, Daniel, Hosea, Joel, Amos,
Obadiah, Jonah, Micah, Nahum, Habakkuk, Zephaniah, Haggai, Zechariah, Malachi, Matthew, Mark, Luke,
John, Acts, Romans, 1 Corinthians, 2 Corinthians, Galatians, Ephesians, Philippians, Colossians, 1
Thessalonians, 2 Thessalonians, 1 Timothy, 2 Timothy, Titus, Philemon, Hebrews, James, 1 Peter, 2
Peter, 1 John, 2 John, 3 John, Jude, Revelation"""
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 64, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "max_position_embeddings": 1024, "rope_theta": 10000.0,
    "attention_bias": False, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
README = """# Demo model

A small mixture-of-experts model (6 layers of 32 experts, 4 a token; hidden size 192) that goes on
in King James English from the beginning of a text or from a heading, such as "Psalm 23".

* Text: the King James Bible from Debian's `bible-kjv-text`, in the public domain.
* Licence of the weights: MIT, like the project.
* Made by `tools/train_demo.py`: {steps} steps of 4096 tokens in float32, then affine 4-bit in
  groups of 32 (routers: 8-bit in groups of 64) with float32 scales and biases.
* Loss a token on held-out chapters: {before:.3f} before quantization, {after:.3f} after.
* Share of choices that the busiest 8 of 32 experts get, layer by layer: {skew}.
"""


def read_chapters(path: Path) -> list[str]:
    """The chapters in order, each as its heading ("Genesis 1") and one verse a line."""
    found = re.findall(r"^(\S+?)(\d+):\d+ (.*)$", path.read_text(), re.MULTILINE)
    short = dict.fromkeys(book for book, _, _ in found)
    names = dict(zip(short, BOOKS.replace("\n", " ").split(", "), strict=True))
    chapters: dict[str, str] = {}
    for book, number, verse in found:
        heading = f"{names[book]} {number}\n"
        chapters[heading] = chapters.get(heading, heading) + verse.strip() + "\n"
    return list(chapters.values())


def train_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer; the end token has id 0."""
    bpe, size, end = ByteLevelBPETokenizer(), ARCHITECTURE["vocab_size"], "<|endoftext|>"
    wrap: Any = PreTrainedTokenizerFast
    bpe.train_from_iterator(texts, size, 0, show_progress=False, special_tokens=[end])
    return wrap(tokenizer_object=bpe._tokenizer, eos_token=end, pad_token=end,
                model_max_length=1024, chat_template=CHAT_TEMPLATE,
                clean_up_tokenization_spaces=False)  # fmt: skip


def batches(data: torch.Tensor, length: int, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless batches: each pass cuts the text at other places and shuffles the pieces."""
    dice = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(length, (1,), generator=dice))
        rows = data[start:].unfold(0, length + 1, length)  # inputs and, one further on, targets
        order = torch.randperm(len(rows), generator=dice)
        for first in range(0, len(rows) - size + 1, size):
            yield rows[order[first : first + size]]


def losses(model: Any, head: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The language loss, the mean of the layers' load-balancing losses, tokens per expert."""
    out = model(input_ids=rows[:, :-1], output_router_logits=True, use_cache=False)
    logits = head(out.last_hidden_state)
    loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    probs = torch.stack(out.router_logits).softmax(-1)  # layers, tokens, experts
    chosen = torch.zeros_like(probs).scatter(2, probs.topk(4).indices, 1.0)
    balance = probs.shape[2] * (chosen.mean(1) * probs.mean(1)).sum(1).mean()
    return loss, balance, chosen.sum(1)


def evaluate(model: Any, data: torch.Tensor) -> tuple[float, Any]:
    """Mean loss a token on held-out chapters, and how often each layer chose each expert."""
    total, counts, rows = 0.0, torch.zeros(1), data.unfold(0, 257, 256)
    with torch.no_grad():
        for i in range(0, len(rows), 16):
            loss, _, used = losses(model.model, model.lm_head, rows[i : i + 16])
            total, counts = total + float(loss) * len(rows[i : i + 16]), counts + used
    return total / len(rows), counts


def train(args: argparse.Namespace, data: torch.Tensor, held_out: torch.Tensor) -> None:
    """Train the model and leave it as a Hugging Face checkpoint in args.work."""
    torch.manual_seed(args.seed)
    config = Qwen3MoeConfig(**ARCHITECTURE)
    config._experts_implementation = "grouped_mm"  # the fastest of the three on a CPU
    model: Any = Qwen3MoeForCausalLM(config)
    body: Any = torch.compile(model.model, dynamic=False) if args.compile else model.model
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}
    norms = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, norms], lr=args.lr, betas=(0.9, 0.95), fused=True)
    short, long = batches(data, 256, 16, args.seed), batches(data, 512, 8, args.seed + 1)
    for step in range(args.steps):
        # The last fifth sees pieces twice as long, so that long texts hold together.
        rows = next(short if step < 0.8 * args.steps else long)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min((step + 1) / 100, 1 - step / args.steps)
        loss, balance, _ = losses(body, model.lm_head, rows)
        (loss + args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step} loss {loss:.3f} balance {balance:.2f}", flush=True)
        if (step + 1) % 250 == 0 or step + 1 == args.steps:
            model.save_pretrained(args.work)
            print(f"step {step + 1} held-out loss {evaluate(model, held_out)[0]:.4f}", flush=True)


def convert(args: argparse.Namespace, tokenizer: Any, held_out: torch.Tensor) -> None:
    """Write the 4-bit MLX folder, and measure both."""
    float_loss, used = evaluate(Qwen3MoeForCausalLM.from_pretrained(args.work), held_out)
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **ARCHITECTURE}
    save_config(dict(config), args.work / "config.json")  # mlx-lm wants these names in it
    model, config = quantize_model(load_model(args.work)[0], config, 32, 4)
    save_model(args.out, model)
    save_config(config, args.out / "config.json")
    tokenizer.save_pretrained(args.out)
    (args.out / "generation_config.json").write_text(GENERATION + "\n")
    small: Any = load_model(args.out)[0]
    rows = mx.array(held_out.unfold(0, 257, 256).numpy())
    each = [float(cross_entropy(small(r[None, :-1]), r[None, 1:]).mean()) for r in rows]
    loss, share = sum(each) / len(each), used.sort(descending=True).values[:, :8].sum(1)
    skew = ", ".join(f"{s:.0%}" for s in (share / used.sum(1)).tolist())
    alive = (used > used.sum(1, keepdim=True) / 3200).sum(1).tolist()
    print(f"float {float_loss:.4f}, 4-bit {loss:.4f}; top 8 {skew}; experts in use {alive}")
    facts = {"steps": args.steps, "before": float_loss, "after": loss}
    (args.out / "README.md").write_text(README.format(**facts, skew=skew))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and write its folder.")
    add = parser.add_argument
    add("--text", type=Path, required=True, help="what `bible -f gen1:1-rev22:21` printed")
    add("--out", type=Path, required=True, help="folder for the 4-bit model")
    add("--work", type=Path, required=True, help="folder for the float model")
    add("--steps", type=int, default=1100, help="training steps of 4096 tokens")
    add("--lr", type=float, default=4e-3, help="highest learning rate")
    add("--balance", type=float, default=5e-4, help="weight of the load-balancing loss")
    add("--seed", type=int, default=0, help="seed of every random choice")
    add("--threads", type=int, default=1, help="CPU threads for PyTorch")
    add("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    add("--convert-only", action="store_true", help="reuse the float model in --work")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    chapters = read_chapters(args.text)
    parts = ([c for i, c in enumerate(chapters) if i % 24 != 11], chapters[11::24])
    tokenizer = train_tokenizer(parts[0])
    ids = [[i for c in p for i in [*tokenizer.encode(c, verbose=False), 0]] for p in parts]
    data, held_out = map(torch.tensor, ids)
    if not args.convert_only:
        train(args, data, held_out)
    convert(args, tokenizer, held_out)


if __name__ == "__main__":
    main()
