"""Fidelity on six kinds of text: KL of compressed models from their original by domain, its mean and its worst.

    python benchmarks/domains.py MODEL OUT [OUT ...] --encyclopaedia wiki.test.txt --language french.txt --work runs/

Compression is calibrated on one kind of text and used on others, so one figure on one text says too little. Every
output is evaluated on the same windows; the ratio of its mean KL to that of the first output has a 95% interval by
bootstrap over windows, each window drawn for both. What is in the work folder already is not made again.

Texts, of which the first `--windows` windows are scored, or as many as there are:

encyclopaedia  the file given, for instance the test split of WikiText-2
documentation  docstrings of Python's standard library
code           its sources, without docstrings
chat           the questions and answers of eval_data in the model's chat template
mathematics    the worked problems of eval_data, then docstrings of sympy (which comes with torch)
language       the file given, in a language other than English

The second to fifth are made on the spot, from the Python that runs this: compare only figures of one version.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from common import OURS, one_each, positive, run, say, set_up
from transformers import AutoTokenizer

DOMAINS = ("encyclopaedia", "documentation", "code", "chat", "mathematics", "language")
EVAL_DATA = Path(__file__).resolve().parents[1] / "eval_data"
PER_MODULE = 3000  # characters taken of one module, so that a domain is many modules
IN_ALL = 100_000  # characters of a domain: more than 20 windows of 512 tokens for any tokenizer
DRAWS = 2000


def modules(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Source and tree of the modules below a folder, in an order that depends on their names alone."""
    files = [path.relative_to(folder) for path in folder.rglob("*.py")]
    files = [path for path in files if not any("test" in part or "-packages" in part for part in path.parts)]
    for path in sorted(files, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        try:
            source = (folder / path).read_text(encoding="utf-8")
            yield source, ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # lib2to3 holds files that are wrong on purpose
            continue


def documented(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a module that have a docstring."""
    for node in ast.walk(tree):
        holder = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if holder and ast.get_docstring(node):
            yield node


def docstrings(folder: Path) -> str:
    """Docstrings of the modules below a folder."""
    return gathered(
        "\n\n".join(ast.get_docstring(node) or "" for node in documented(tree)) for _, tree in modules(folder)
    )


def code(folder: Path) -> str:
    """Sources of the modules below a folder, without their docstrings."""
    return gathered(bare(source, tree) for source, tree in modules(folder))


def bare(source: str, tree: ast.Module) -> str:
    """A module's source without its docstrings."""
    lines = source.splitlines()
    for node in documented(tree):
        held = node.body[0]  # type: ignore[attr-defined]
        lines[held.lineno - 1 : held.end_lineno] = [""] * (held.end_lineno - held.lineno + 1)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def gathered(texts: Iterator[str]) -> str:
    """The beginnings of texts that are no mere line, until there is enough."""
    parts: list[str] = []
    for text in texts:
        if len(text) > 200:
            parts.append(text[:PER_MODULE])
        if sum(map(len, parts)) > IN_ALL:
            break
    return "\n\n".join(parts)


def chat(model: Path) -> str:
    """Questions and answers of eval_data, four to a conversation, in the model's chat template."""
    text = (EVAL_DATA / "qa_mixed_questions.txt").read_text()
    text += "\n" + re.sub(
        r"(?m)^(User|Assistant):",
        lambda found: found[1][0].replace("U", "Q") + ":",
        (EVAL_DATA / "dialogue_assistant_piano_names_toast.txt").read_text(),
    )
    pairs = re.findall(r"^Q: (.*?)\n+^A: (.*?)(?=^Q: |\Z)", text, re.MULTILINE | re.DOTALL)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    if not tokenizer.chat_template:
        raise SystemExit(f"{model} has no chat template; leave out the domain chat with --domain")
    conversations = []
    for start in range(0, len(pairs), 4):
        turns = []
        for question, answer in pairs[start : start + 4]:
            turns += [{"role": "user", "content": question.strip()}, {"role": "assistant", "content": answer.strip()}]
        conversations.append(tokenizer.apply_chat_template(turns, tokenize=False))
    return "\n".join(conversations)


def mathematics() -> str:
    """Worked problems of eval_data, and docstrings of sympy."""
    found = importlib.util.find_spec("sympy")
    if found is None or found.origin is None:
        raise SystemExit("sympy is not installed; leave out the domain mathematics with --domain")
    own = (EVAL_DATA / "maths_worked_problems.txt").read_text()
    return own + "\n\n" + docstrings(Path(found.origin).parent)


def texts(args: argparse.Namespace) -> dict[str, Path]:
    """The file of every domain asked for."""
    library = Path(sysconfig.get_path("stdlib"))
    made = {
        "documentation": lambda: docstrings(library),
        "code": lambda: code(library),
        "chat": lambda: chat(args.model),
        "mathematics": mathematics,
    }
    given = {"encyclopaedia": args.encyclopaedia, "language": args.language}
    files = {}
    for domain in args.domain or DOMAINS:
        if domain in made:
            files[domain] = args.work / f"{domain}.txt"
            if not files[domain].exists():
                files[domain].write_text(made[domain](), encoding="utf-8")
        elif given[domain] is None:
            raise SystemExit(f"the domain {domain} needs a file: --{domain} FILE; or name the others with --domain")
        else:
            files[domain] = given[domain]
    return files


def windows_in(text: Path, args: argparse.Namespace) -> int:
    """How many windows of a text are scored."""
    tokens = AutoTokenizer.from_pretrained(args.model)(text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    return min(int(args.windows), len(tokens) // args.length)


def state(out: Path) -> str:
    """What tells an output from one that was made anew under its name: names, sizes and times of its files."""
    files = sorted(out.rglob("*")) if out.is_dir() else [out]
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((str(out.resolve()), facts)).encode()).hexdigest()[:8]


def by_window(out: Path, text: Path, windows: int, domain: str, args: argparse.Namespace) -> list[float]:
    """Mean KL of every window, natural logarithm."""
    saved = args.work / f"{out.name}-{state(out)}-{domain}-{windows}x{args.length}.json"
    if not saved.exists():
        say(f"{out.name} on {domain}")
        command = [*OURS, "eval", str(out), "--ref", str(args.model), "--text", str(text), "-o", str(saved)]
        run(
            [*command, "--length", str(args.length), "--windows", str(windows)],
            saved.with_suffix(".log"),
        )
    values: list[float] = json.loads(saved.read_text())["by_window"]["kl"]
    return values


def mean(domains: list[list[float]]) -> float:
    """Mean of the domains' means: a domain of few windows counts as much as one of many."""
    return fmean(map(fmean, domains))


def ratio(ours: list[list[float]], first: list[list[float]]) -> tuple[float, float, float]:
    """Mean KL of an output over that of the first, and its 95% interval by paired bootstrap within every domain."""
    generator = random.Random(0)
    drawn = []
    for _ in range(DRAWS):
        picks = [generator.choices(range(len(values)), k=len(values)) for values in ours]
        again = [
            [[values[i] for i in pick] for values, pick in zip(side, picks, strict=True)] for side in (ours, first)
        ]
        drawn.append(share(mean(again[0]), mean(again[1])))
    drawn.sort()
    return share(mean(ours), mean(first)), drawn[DRAWS // 40], drawn[-DRAWS // 40]


def share(ours: float, first: float) -> float:
    """The ratio of two divergences; NaN where the first is exact."""
    return ours / first if first else float("nan")


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """As Markdown; found: KL by window of every domain of every output."""
    first = next(iter(found.values()))
    counts = [f"{domain} ({len(values)})" for domain, values in first.items()]
    lines = [
        f"| KL (windows) | {' | '.join(counts)} | mean | worst | mean beside the first (95%) |",
        "|---|" + "---|" * (len(counts) + 3),
    ]
    for name, domains in found.items():
        means = [fmean(values) for values in domains.values()]
        beside, low, high = ratio(list(domains.values()), list(first.values()))
        cells = [f"{value:.4f}" for value in (*means, fmean(means), max(means))]
        lines.append(f"| {name} | {' | '.join(cells)} | {beside:.3f} ({low:.3f} to {high:.3f}) |")
    return "\n".join(lines)


def main() -> None:
    """Make the texts, evaluate what is missing, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--encyclopaedia", type=Path)
    parser.add_argument("--language", type=Path)
    parser.add_argument("--domain", action="append", choices=DOMAINS, help="only this one; repeatable")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=positive, default=20)
    parser.add_argument("--work", type=Path, required=True, help="where texts and evaluations are kept, for one model")
    args = parser.parse_args()
    one_each((out.name for out in args.out), "outputs")
    set_up(threads=1)
    args.work.mkdir(parents=True, exist_ok=True)
    files = texts(args)
    counts = {domain: windows_in(text, args) for domain, text in files.items()}
    found = {
        out.name: {domain: by_window(out, text, counts[domain], domain, args) for domain, text in files.items()}
        for out in args.out
    }
    print(table(found))


if __name__ == "__main__":
    main()
