"""The reference pages of the site, made of schemas, registries and docstrings when ``mkdocs`` builds it, as a hook."""

from __future__ import annotations

import ast
import html
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from itertools import pairwise, takewhile
from pkgutil import resolve_name

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from locret_kit.__main__ import COMMANDS as LISTED
from locret_kit.config import recipes as recipe_files
from locret_kit.config.eval_options import EVAL, FIGURE, PAIRED, REPORT, TABLE
from locret_kit.config.infer_options import ASK, CHAT, INFER, INFO, KEPT, READ, BatchPrompt
from locret_kit.config.schema import COMMON_OPTIONS, Command, Repeatable, docstrings, groups_of
from locret_kit.config.serve_options import PLAN, SERVE, VLLM
from locret_kit.config.train_options import PUBLISH
from locret_kit.settings import PUBLISHED, RunSettings
from locret_kit.validation import annotations_of, choices, metadata_of, type_words

COMMANDS: tuple[Command, ...] = (
    INFER, READ, ASK, CHAT, KEPT, INFO, SERVE, VLLM, EVAL, PLAN, recipe_files.TRAIN, PUBLISH,
)  # fmt: skip
OF_EVAL = {
    "paired": PAIRED, "table": TABLE, "figure": FIGURE, "report": REPORT,
}  # fmt: skip
PYTHON: dict[str, Sequence[str]] = {
    "locret_kit.Document": ("read", "append", "prepare", "ask", "chat", "save", "load"),
    "locret_kit.Chat": ("say", "undo", "retry", "pin"),
    "locret_kit.attach": (),
    "locret_kit.BoundedCache": ("fork", "pin", "unpin", "reset", "with_budget", "kept_positions"),
    "locret_kit.RetainingHeads": ("from_pretrained", "save_pretrained"),
    "locret_kit.HeadsConfig": (),
    "locret_kit.save_cache": (),
    "locret_kit.load_cache": (),
    "locret_kit.publish": (),
    "locret_kit.settings.RunSettings": (),
    "locret_kit.backbones.load.load_backbone": (),
    "locret_kit.runtime.session.Answer": (),
    "locret_kit.runtime.session.Sampling": (),
    "locret_kit.runtime.engine.run": (),
    "locret_kit.runtime.engine.Request": (),
    "locret_kit.cache.batch.BatchCache": (),
    "locret_kit.policies.grammar.parse_policy": (),
    "locret_kit.policies.registry.part": (),
    "locret_kit.policies.registry.register": (),
    "locret_kit.policies.registry.load_plugin": (),
    "locret_kit.policies.base.Score": (
        "recent", "memory", "score_new_tokens", "score_slots", "comparable", "log_weight",
    ),
    "locret_kit.policies.base.Scope": ("window", "reserved", "protects"),
    "locret_kit.policies.base.Entry": (),
    "locret_kit.policies.base.Slots": ("newest",),
}  # fmt: skip
"""Public objects, and the methods that are described with them."""


# ---- Markdown ------------------------------------------------------------------------------------------------------


def page(title: str, *blocks: str) -> str:
    """A page: its title, and blocks with blank lines between."""
    return "\n\n".join([f"# {title}", *(text for block in blocks if (text := block.strip("\n")))]) + "\n"


def _cell(text: str) -> str:
    """A table's cell in one line. Code with a bar is HTML: GitHub wants a backslash before the bar, which mkdocs would show."""
    code = re.sub(r"`([^`]*\|[^`]*)`", lambda found: f"<code>{html.escape(found[1], quote=False)}</code>", text)
    return " ".join(code.split()).replace("|", "&#124;")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are on one line each."""
    lines = [" | ".join(header), " | ".join("---" for _ in header)]
    lines += [" | ".join(map(_cell, row)) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def plain(text: str) -> str:
    """A docstring's text as Markdown."""
    return re.sub(r"(?<!\d)arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text.replace("``", "`"))


def prose(doc: str) -> str:
    """A docstring as Markdown: ``Args:``, ``Raises:`` and the like become lists."""
    out: list[str] = []
    inside = False
    for line in inspect.cleandoc(doc).splitlines():
        section = re.fullmatch(r"(Args|Raises|Attributes|Returns|Yields):", line)
        item = re.match(r"    (\**[\w.]+(?:, \**\w+)*): (.*)", line)
        if section:
            inside = True
            out += ["", f"{section[1]}:", ""]
        elif inside and item:
            out.append(f"- `{item[1]}`: {item[2]}")
        elif inside and line.startswith("        "):
            out.append(f"  {line.strip()}")
        elif match := re.match(r"(Raises|Source): ?(.*)", line):
            out += ["", f"{match[1]}: {match[2]}"]
        else:
            inside = inside and (not line or line.startswith(" "))
            out.append(line.strip() if inside else line)
    return plain("\n".join(out)).replace("\n\n\n", "\n\n").replace("::\n", ":\n")


def shown(default: object) -> str:
    """A default in a table."""
    if default is MISSING:
        return "required"
    if isinstance(default, bool):
        return "yes" if default else "no"
    if default is None or default == []:
        return ""
    if isinstance(default, list | tuple):
        return f"`[{','.join(map(str, default))}]`"
    return f"`{default}`"


def type_of(annotation: object) -> str:
    """Allowed values of an annotation, in words; without the bound of 32-bit integers."""
    metadata = list(metadata_of(annotation))
    if any(getattr(getattr(item, "func", None), "__name__", "") == "is_size" for item in metadata):
        return "a size, such as 24GiB"
    if any(isinstance(item, Repeatable) for item in metadata):
        return "a text; may be given several times"
    return re.sub(r" (and at most 2147483647|and below 2147483648|\(at most 2147483647\))", "", type_words(annotation))


def fields_table(schema: type) -> str:
    """The fields of a dataclass: name, type, meaning."""
    said, rows = docstrings(schema), []
    try:
        known = annotations_of(schema)
    except NameError:  # names that are imported for types alone
        known = {}
    for item in fields(schema):
        bounds = item.name in known and (any(metadata_of(known[item.name])) or choices(known[item.name]))
        kind = type_of(known[item.name]) if bounds else f"`{item.type}`"
        rows.append((f"`{item.name}`", kind, plain(said.get(item.name, ""))))
    return table(("field", "type", "meaning"), rows)


def attributes(made: type) -> str:
    """The documented attributes of a class that is no dataclass."""
    (tree,) = ast.parse(inspect.getsource(made)).body
    assert isinstance(tree, ast.ClassDef)
    rows = [
        (f"`{ast.unparse(above.target)}`", f"`{ast.unparse(above.annotation)}`", plain(below.value.value))
        for above, below in pairwise(tree.body)
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    ]
    return table(("attribute", "type", "meaning"), rows) if rows else ""


# ---- pages ---------------------------------------------------------------------------------------------------------


def options(command: Command) -> Iterator[str]:
    """The options of a command, in the groups of its help."""
    for title, known in groups_of(command):
        rows = []
        for option in known:
            name = option.name
            flag = name if command is recipe_files.TRAIN else f"--{name.replace('_', '-')}"
            bare = f"`{name.upper()}` or " if name in command.positional else ""
            rows.append((f"{bare}`{flag}`", type_of(option.annotation), shown(option.default), plain(option.help)))
        yield f"**{title}**"
        yield table(("option", "value", "default", "meaning"), rows)


def commands() -> str:
    """Page of all commands: their common options, and a line for each."""
    rows = ((f"[{name}](commands/{name}.md)", says) for name, says in LISTED.items())
    common = ((f"`--{name}`", re.sub(r"^(FILE|\[all\])  ", "", says)) for name, says in COMMON_OPTIONS.items())
    return page(
        "Commands",
        table(("command", "does"), rows),
        "Every option can be written `--key value`, `--key=value` or `key=value`, in any order; `-` and `_` are alike in names. "
        "A switch is `--key` or `--no-key`. An empty default means that the option is off, or what its meaning says. `--help` "
        "shows the options that matter, `--help all` every one.",
        "Every command also takes:",
        table(("option", "meaning"), common),
    )


def command_page(command: Command) -> str:
    """A command with every option, and its subcommands."""
    from locret_kit.cli.chat import COMMANDS as inside
    from locret_kit.evals.report import FIGURES

    usage = f"{command.usage.strip()}\n{command.notes}".rstrip()
    blocks = [f"```text\n{usage}\n```", *options(command)]
    if command is EVAL:
        for name, one in OF_EVAL.items():
            blocks += [f"## locret-eval {name}", f"```text\n{one.usage.strip()}\n```", *options(one)]
        blocks += [
            "## Figures",
            table(("figure", "shows"), ((f"`{name}`", says) for name, (_, says) in FIGURES.items())),
        ]
    if command is CHAT:
        talk = ((f"`/{name} {takes}".strip() + "`", meaning) for name, (takes, meaning) in inside.items())
        blocks += ["## Commands of the chat", table(("command", "meaning"), talk)]
    return page(command.name, *blocks)


def settings() -> str:
    """Every setting of a bounded run."""
    said, known = docstrings(RunSettings), annotations_of(RunSettings)
    own_first = sorted(fields(RunSettings), key=lambda item: item.name not in RunSettings.__annotations__)
    rows = [
        (f"`{item.name}`", type_of(known[item.name]), "yes" if item.name in PUBLISHED else "", plain(said[item.name]))
        for item in own_first
    ]
    return page(
        "Settings",
        "The settings of a bounded run, the same in every command (`--budget 512`), in Python (`BoundedCache(budget=512)`), in "
        "YAML files and in evaluation rows. A setting that is not given is what the heads were published with, then the "
        "default.",
        table(("setting", "value", "published with heads", "meaning"), rows),
    )


def policies() -> str:
    """Every named policy and every part."""
    from locret_kit.policies.grammar import composed_of, parse_policy, parts_of
    from locret_kit.policies.registry import KINDS, parameters_of, parts_named
    from locret_kit.policies.registry import policies as named_policies

    blocks = [
        "A policy is named (`snapkv`, `streaming(sinks=8)`), composed of parts (`score=cis scope=stabilizers+sinks(4)`), or a "
        "named policy with some of its parts changed (`h2o merge=nearest`). Parts are separated by blanks. Which one to "
        "choose, and what each kind of part says, is [another page](../policies.md).",
        "`a` is the attention of one query to one slot, the mean over the query heads that share the slot's key.",
        "## Named policies",
    ]
    for name, named in named_policies().items():
        policy = parse_policy(name)
        needs = {
            "retaining heads": policy.needs_heads,
            "a backbone whose rotation is known": policy.needs_unrotated,
            "the backbone's probability of each token": policy.score.needs_logits,
            f"statistics of attention ({', '.join(sorted(policy.statistics))})": bool(policy.statistics),
            "queries of the newest tokens": policy.recent(512) > 0,
        }
        parts = composed_of(policy)
        full = parts == "-"
        links = dict.fromkeys(
            f"[{kind}={name}](#{kind}{name})"
            for kind, text in parts_of(policy).items()
            if kind == "sparse" or not policy.keeps_everything
            for name in re.findall(r"(?:^|\+)([\w-]+)", re.sub(r"\([^)]*\)", "", text))
        )
        rows = [
            ("a slot is kept for", named.keeps),
            ("parts", "keeps every slot" if full else f"`{parts}`"),
            ("formulas", ", ".join(links)),
            ("parameters", ", ".join(f"`{key}={one.default}`" for key, one in named.parameters().items())),
            ("source", plain(policy.source)),
            ("needs", "; ".join(what for what, yes in needs.items() if yes)),
            ("heads of a layer", "share its slots by need" if policy.ragged else ""),
        ]
        blocks += [f"### {name}", table(("", ""), (row for row in rows if row[1]))]
    for kind in KINDS:
        blocks.append(f"## Part: {kind}")
        for name, made in parts_named(kind).items():
            said = docstrings(made)
            rows = [
                (
                    f"`{key}`", "; ".join(dict.fromkeys(type_of(one) for one in parameter.annotations)),
                    shown(parameter.default), plain(said.get(key, "")),
                )
                for key, parameter in parameters_of(made).items()
            ]  # fmt: skip
            blocks += [f"### {kind}={name}", prose(made.__doc__ or "")]
            if rows:
                blocks.append(table(("parameter", "value", "default", "meaning"), rows))
    return page("Policies and their parts", *blocks)


def recipes() -> str:
    """Every recipe, with the comment that its file begins with."""
    folder = recipe_files.recipes_folder()
    rows = []
    for path in (folder / f"{name}.yaml" for name in recipe_files.known_recipes()):
        first = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        said = (f"`{line[1:].strip()}`" if line.startswith("#  ") else line[2:] for line in first)
        rows.append((f"`{path.stem}`", " ".join(said)))
    return page(
        "Recipes",
        "`locret-train recipe=NAME key=value ...` takes one of these, or the path of a YAML file of the same form; with "
        "`--print-config` it prints every setting. Keys are those of [`locret-train`](commands/locret-train.md), files are in "
        "`recipes/`.",
        table(("recipe", "what it is"), rows),
    )


def tasks() -> str:
    """Every task."""
    from locret_kit.evals.tasks import ALIASES, DESCRIPTIONS, HAYSTACK_TASKS, REAL_TEXT_TASKS, STANDALONE_TASKS, groups
    from locret_kit.evals.tasks.document_tasks import BENCHMARKS, entries

    blocks = [
        f"`locret-eval tasks=[NAME,...]`. Groups: {', '.join(f'`{name}`' for name in groups())}. `fidelity:NAME` scores a task "
        "by the distance of its answers from full attention's, `agreement:NAME` by the share of full attention's own tokens that "
        "would have been chosen too. Short names: "
        + ", ".join(f"`{short}` is `{name}`" for short, name in ALIASES.items())
        + ".",
    ]
    for title, names in (
        ("Synthetic, over repeated sentences or real text (`haystacks=`)", HAYSTACK_TASKS),
        ("Synthetic, with a text of their own", STANDALONE_TASKS),
        ("Over real text (`haystacks=`)", REAL_TEXT_TASKS),
    ):
        blocks += [f"## {title}", table(("task", "asks for"), ((f"`{name}`", DESCRIPTIONS[name]) for name in names))]
    for benchmark, start in BENCHMARKS.items():
        rows = [
            (
                f"`{name}`", f"`{one.metric}`" if one.kind == "answer" else one.kind, str(one.max_new_tokens),
                "yes" if one.chat else "no", one.truncate, f"`{one.hub.get('data_files', one.hub.get('path', ''))}`",
            )
            for name, one in entries().items()
            if name.startswith(start) and (start or "." not in name)
        ]  # fmt: skip
        blocks += [
            f"## Documents: {benchmark}",
            "Records come from files in a folder of `data=`, or from the Hub.",
            table(("task", "metric", "answer tokens", "chat template", "a document too long loses its", "Hub"), rows),
        ]
    return page("Tasks", *blocks)


def signature(made: Callable[..., object], name: str) -> str:
    """Signature of a function or a class, one argument a line where it is long."""
    sign = inspect.signature(made)
    words: list[str] = []
    for one in sign.parameters.values():
        if one.name not in ("self", "cls"):
            if one.kind == one.KEYWORD_ONLY and "*" not in words:
                words.append("*")
            words.append(re.sub(r"^([*\w]+: )'([^']*)'", r"\1\2", str(one)))
    returns = sign.return_annotation
    back = f" -> {returns}" if isinstance(returns, str) and not inspect.isclass(made) else ""
    line = f"{name}({', '.join(words)}){back}"
    if len(line) > 100:
        line = "\n    ".join([f"{name}(", *(f"{word}," for word in words)]) + f"\n){back}"
    return f"```python\n{line}\n```"


def python() -> str:
    """The Python interface."""
    blocks = [
        "What is listed here is meant to be called. Shapes are in the names: `B` texts, `H` key/value heads, `Q` query heads, "
        "`S` slots of a head, `T` new tokens, `D` channels. [What is stable](../stability.md) says which of it may change.",
    ]
    for name, methods in PYTHON.items():
        home, _, last = name.rpartition(".")
        made = resolve_name(name)
        blocks += [f"## {last}", f"`from {home} import {last}`"]
        if is_dataclass(made) and isinstance(made, type):
            blocks += [prose(made.__doc__ or ""), fields_table(made)]
        elif inspect.isclass(made) and getattr(made, "_is_protocol", False):
            blocks += [prose(made.__doc__ or ""), attributes(made)]
        else:
            assert callable(made)
            blocks += [signature(made, last), prose(made.__doc__ or "")]
        for method in methods:
            one = getattr(made, method)
            blocks += [f"### {last}.{method}", signature(one, f"{last}.{method}"), prose(one.__doc__ or "")]
    return page("Python", *blocks)


def files() -> str:
    """Files that the kit writes and reads."""
    from locret_kit.cache import file as cache_file
    from locret_kit.cache.restore import Saved
    from locret_kit.documents.text_record import TextRecord
    from locret_kit.evals import engine
    from locret_kit.heads import FORMAT, HeadsConfig
    from locret_kit.policies.methods import lococo
    from locret_kit.runtime.report import Report
    from locret_kit.samples.records import SCHEMAS

    return page(
        "File formats",
        "Files are written beside their place and renamed when they are whole. Nothing that is read is executed, but for a "
        "`.pt` or `.bin` of weights, of which `torch.load` with `weights_only=True` reads tensors and plain values.",
        "## Retaining heads",
        f"A folder with `model.safetensors` (`model.layers.N.self_attn.fc1.weight` and `fc2`) and `config.json`, whose `format` "
        f"is `{FORMAT}`; or one `.pt` file of both. Its other fields:",
        fields_table(HeadsConfig),
        "## LoCoCo's pool",
        f"A folder with `model.safetensors` and `config.json`, whose `format` is `{lococo.FORMAT}`. Its other fields:",
        fields_table(lococo.PoolConfig),
        "## Documents and saved caches",
        prose(cache_file.__doc__ or ""),
        "The record of a cache:",
        fields_table(Saved),
        "Its field `document`, where a text was read:",
        fields_table(TextRecord),
        "## Prompts of a batch",
        prose(BatchPrompt.__doc__ or "").split("\n")[0] + " `prompt`, or `text` and `question`, or `messages`.",
        fields_table(BatchPrompt),
        "## Report of `--report`",
        prose(Report.__doc__ or ""),
        fields_table(Report),
        "## Evaluation rows",
        prose(engine.__doc__ or ""),
        fields_table(engine.Row),
        "## Training records",
        "JSON, JSONL or Parquet; the schema is recognised by the keys. [One record of "
        "each](../tutorials/train.md#your-own-records).",
        "\n".join(f"- {schema}" for schema in SCHEMAS),
    )


def metrics() -> str:
    """Figures of the server's ``/metrics``."""
    from locret_kit.serving.figures import Counters, Figures

    rows = []
    for metric in Figures(Counters(), {}).collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        rows.append(
            (f"`{name}`", "histogram, seconds" if metric.type == "histogram" else metric.type, metric.documentation)
        )
    return page(
        "Metrics of the server",
        "`GET /metrics` of [`locret-serve`](../serving.md), in Prometheus' text format.",
        table(("metric", "kind", "says"), rows),
    )


PAGES: dict[str, Callable[[], str]] = {
    f"{make.__name__}.md": make for make in (commands, settings, policies, recipes, tasks, python, files, metrics)
} | {f"commands/{command.name}.md": partial(command_page, command) for command in COMMANDS}
"""Pages of ``reference/``, beside models.md, which is committed."""


SOURCES = {
    "locret_kit/__init__.py": "python.md", "locret_kit/__main__.py": "commands.md", "locret_kit/settings.py": "settings.md",
    "locret_kit/config/eval_options.py": "commands/locret-eval.md", "recipes": "recipes.md",
    "locret_kit/config/train_options.py": "commands/locret-train.md",
    "locret_kit/config/infer_options.py": "files.md#prompts-of-a-batch", "locret_kit/serving/figures.py": "metrics.md",
    "locret_kit/documents/document.py": "python.md#document", "locret_kit/evals/tasks/__init__.py": "tasks.md",
    "locret_kit/policies/methods": "policies.md", "locret_kit/policies/slots.py": "python.md#entry",
}  # fmt: skip
"""Code that the committed pages link to, and the page of ``reference/`` to which such a link leads on the site."""


def on_page_markdown(markdown: str, page: Page, **rest: object) -> str:
    """Lead links to the code to the pages made of it, as mkdocs asks its hooks."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(
        rf"\]\({up}\.\./((?:locret_kit|recipes)[^)]*)\)", lambda link: f"]({up}reference/{SOURCES[link[1]]})", markdown
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the site, as mkdocs asks its hooks."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}", content=make()))
    return files
