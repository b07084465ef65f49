"""Publishing and loading by name, through the real client, against a local server that speaks the Hub's calls."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from hub_client import ROOT, client
from hub_server import HubServer
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from tiny_lora import make_lora
from tiny_tokenizer import save_tiny_backbone

from locret_kit import HeadsConfig, RetainingHeads, hub
from locret_kit.backbones.spec import AttentionLayer, BackboneSpec
from locret_kit.card import read_card, write_release
from locret_kit.heads import state_of
from locret_kit.runtime.report import weights_hash

SPEC = BackboneSpec("llama", tuple(AttentionLayer(4, 2, 8, 8, index=i) for i in range(3)), "silu")
INFERENCE = {"budget": 64, "chunk": 32, "stabilizers": 8, "local_len": 8, "positions": "compact"}
CONFIG = HeadsConfig.for_backbone(SPEC, "lab/tiny", 16, target="log_prob", inference=INFERENCE)
ROWS = [
    {"task": "R.PassKey", "haystack": h, "length": 4096, "budget": b, "policy": p, "heads": n, "sample": i, "score": s}
    for h, b, p, n, i, s in (
        ("jargon", 512, "locret", "heads", 0, 1.0),
        ("jargon", 512, "locret", "heads", 1, 0.0),
        ("repeated", 512, "locret", "heads", 0, 1.0),
        ("jargon", 512, "streaming", "-", 0, 0.0),
        ("jargon", 512, "locret", "other", 0, 0.25),
    )
]


def make(config: HeadsConfig = CONFIG, seed: int = 0) -> RetainingHeads:
    torch.manual_seed(seed)
    return RetainingHeads(config)


def save(folder: Path, config: HeadsConfig = CONFIG) -> Path:
    make(config).save_pretrained(folder, torch.bfloat16)
    make(config).save_pretrained(folder.with_suffix(".pt"), torch.bfloat16)
    (folder / "curves.csv").write_text("step,loss\n1,2.0\n")
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"half')
    training = {
        "data": {"sources": ["synthetic", "Some/Set", "/home/me/secret/x.jsonl"], "max_tokens": 512},
        "optim": {"steps": 4, "accumulate": 1, "lr": 0.001},
        "target": {"kind": "log_prob"},
        "loss": {"top_fraction": 0.05, "top_weight": 20.0},
    }
    (folder / "training.json").write_text(json.dumps(training))
    return folder


# ---- the card and the folder that is published --------------------------------------------------------------------


def test_metadata_of_the_card(tmp_path):
    """Of heads in one file, beside which the rest lies in a folder."""
    write_release(make(), "me/heads", tmp_path / "release", save(tmp_path / "heads").with_suffix(".pt"))
    text = (tmp_path / "release" / "README.md").read_text()
    data = yaml.safe_load(text.split("---\n")[1])
    index = data.pop("model-index")
    assert data == {
        "base_model": "lab/tiny", "base_model_relation": "adapter", "library_name": "locret_kit",
        "license": "apache-2.0", "pipeline_tag": "text-generation", "tags": ["locret", "kv-cache", "long-context"],
        "datasets": ["Some/Set"],
    }  # fmt: skip
    assert index[0]["name"] == "heads"
    results = {r["dataset"]["config"]: r["metrics"][0] for r in index[0]["results"]}
    assert results.keys() == {"jargon, 4096 tokens", "repeated, 4096 tokens"}, "and no other heads, no other policy"
    assert results["jargon, 4096 tokens"]["value"] == 0.5
    assert results["jargon, 4096 tokens"]["args"] == {"budget": 512, "samples": 2}
    assert "| R.PassKey | jargon | 4096 | 512 | match | 0.50 [0.09, 0.91] (n=2) |" in text


def test_a_hand_written_card_keeps_its_words_and_gets_what_it_lacks(tmp_path):
    source = save(tmp_path / "heads")
    facts = "license: mit\ntags: [mine]\nbase_model: lab/other\nlanguage: en\n"
    (source / "README.md").write_text(f"---\n{facts}---\n# My heads\n\nAs I say.\n")
    write_release(make(), "me/heads", tmp_path / "r", source)
    given, prose = read_card(tmp_path / "r" / "README.md")
    assert (given["license"], given["tags"], given["language"]) == ("mit", ["mine"], "en")
    assert given["base_model"] == "lab/other" == RetainingHeads.from_pretrained(str(tmp_path / "r")).config.backbone
    assert prose.strip().startswith("# My heads\n\nAs I say.")
    assert 'RetainingHeads.from_pretrained("me/heads")' in prose
    write_release(make(), "me/heads", tmp_path / "r2", source, license="apache-2.0", base_model="lab/tiny")
    given, _ = read_card(tmp_path / "r2" / "README.md")
    assert (given["license"], given["base_model"]) == ("apache-2.0", "lab/tiny")


def test_results_of_a_published_card_make_way_for_those_of_today(tmp_path):
    """Its folder was fetched from the Hub, and evaluated again."""
    write_release(make(), "me/heads", tmp_path / "heads", save(tmp_path / "run" / "heads"))
    before = (tmp_path / "heads" / "README.md").read_text()
    (tmp_path / "heads" / "README.md").write_text(f"{before}\nMy words.\n")
    more = "".join(
        json.dumps({**ROWS[0], "sample": sample}) + "\n" for sample in (0, 2)
    )  # 0 is known from the other file
    (tmp_path / "heads" / "rows.0.jsonl").write_text(more)
    write_release(make(), "me/heads", tmp_path / "again", tmp_path / "heads")
    after = (tmp_path / "again" / "README.md").read_text()
    assert (before.count("(n=2)"), after.count("(n=2)"), after.count("(n=3)")) == (1, 0, 1)
    assert after.count("## Measured") == after.count("My words.") == 1


def test_results_of_other_weights_by_the_same_name_are_not_those_of_these(tmp_path):
    """Every run's heads are named heads; these have been trained anew since some of the rows."""
    source, mine = save(tmp_path / "heads"), weights_hash(make())
    rows = [{**ROWS[0], "sample": i, "score": s, "heads_hash": h} for i, s, h in ((0, 1.0, mine), (1, 0.0, "f" * 16))]
    (source / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_release(make(), "me/heads", tmp_path / "release", source)
    assert "| match | 1.00 [0.21, 1.00] (n=1) |" in (tmp_path / "release" / "README.md").read_text()


def test_heads_that_were_half_written_are_not_the_best(tmp_path):
    """A full disk leaves a folder without weights."""
    save(tmp_path / "best" / "recall=0.1000-step=2")
    (tmp_path / "best" / "recall=0.2000-step=4").mkdir()
    assert torch.equal(RetainingHeads.from_pretrained(tmp_path / "best")[0].fc1.weight, make()[0].fc1.weight.bfloat16())


SHIPPED = {
    "smollm2-135m-locret": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
    "gemma3-270m-locret": ("google/gemma-3-270m", "gemma"),
    "qwen2.5-coder-0.5b-locret": ("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M", "apache-2.0"),
    "qwen2.5-coder-1.5b-locret": ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", "apache-2.0"),
}
"""Backbone and license of the heads in ``checkpoints``."""


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_heads_can_be_published(tmp_path, name):
    shipped = ROOT / "checkpoints" / name
    write_release(RetainingHeads.from_pretrained(str(shipped)), "me/heads", tmp_path, shipped)
    assert json.loads((tmp_path / "config.json").read_text())["backbone"] == SHIPPED[name][0]
    given, prose = read_card(tmp_path / "README.md")
    base_model, license = SHIPPED[name]
    assert (given["base_model"], given["license"]) == (base_model.partition(":")[0], license)
    assert "## How they were trained" in prose
    ours, theirs = (RetainingHeads.from_pretrained(str(path)).state_dict() for path in (shipped, tmp_path))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_card_keeps_its_results_where_there_are_no_others(tmp_path):
    write_release(make(), "me/heads", tmp_path / "first", save(tmp_path / "heads"))
    (tmp_path / "first" / "results.jsonl").unlink()
    write_release(make(), "me/heads", tmp_path / "again", tmp_path / "first")
    index, same = (read_card(tmp_path / name / "README.md")[0]["model-index"] for name in ("first", "again"))
    assert same == index


def test_the_card_of_heads_whose_layers_differ_has_all_sizes(tmp_path):
    layers = AttentionLayer(4, 2, 8, 8, index=0), AttentionLayer(4, 1, 16, 12, index=1)
    write_release(
        make(HeadsConfig.for_backbone(BackboneSpec("llama", layers, "silu"), "lab/tiny", 16)), "me/x", tmp_path
    )
    assert "One MLP (64 or 92 -> 16 -> 2 or 1, silu, no biases)" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("exact", [True, False])
def test_weights_are_published_without_loss(tmp_path, exact):
    heads = make().to(torch.bfloat16).float() if exact else make()
    write_release(heads, "me/heads", tmp_path)
    back = RetainingHeads.from_pretrained(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), back.parameters(), strict=True))
    kinds = {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()}
    assert kinds == {torch.bfloat16 if exact else torch.float32}


def test_what_others_could_not_load_is_refused(tmp_path):
    for config, flag in (
        (replace(CONFIG, backbone=str(tmp_path)), "--base-model"),
        (replace(CONFIG, backbone="checkpoints/none"), "--base-model"),
        (replace(CONFIG, adapter=str(tmp_path)), "--adapter"),
    ):
        with pytest.raises(ValueError, match=f"others cannot load: give {flag} user/name"):
            write_release(make(config), "me/heads", tmp_path / "r")
    with pytest.raises(ValueError, match="which others are to load, must be user/name"):
        write_release(make(), "me/heads", tmp_path / "r", base_model=str(tmp_path))
    for repo in ("heads", "../x", "me/a b"):
        with pytest.raises(ValueError, match="must be user/name"):
            write_release(make(), repo, tmp_path / "r")
    with pytest.raises(ValueError, match="the heads were trained without one"):
        write_release(make(), "me/heads", tmp_path / "r", adapter="lab/lora")
    write_release(make(replace(CONFIG, adapter=str(tmp_path))), "me/heads", tmp_path / "r", adapter="lab/lora")
    assert RetainingHeads.from_pretrained(str(tmp_path / "r")).config.adapter == "lab/lora"
    assert 'load_backbone("lab/tiny", adapter="lab/lora")' in (tmp_path / "r" / "README.md").read_text()


def test_the_card_of_the_best_heads_of_a_run_says_their_step_and_recall(tmp_path):
    source = tmp_path / "best"
    for recall, step in ((0.4, 4), (0.5, 2)):
        folder = save(source / f"recall={recall:.4f}-step={step}")
        training = json.loads((folder / "training.json").read_text())
        training |= {"set_aside": 8, "step": step, "recall": recall}
        (folder / "training.json").write_text(json.dumps(training))
        rows = ({**row, "heads": "best"} for row in ROWS)  # as ckpt=best has them
        (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_release(RetainingHeads.from_pretrained(str(source)), "me/heads", tmp_path / "release", source)
    card = (tmp_path / "release" / "README.md").read_text()
    assert "\n2 of 4 steps of 1 sample per device" in card and "\nRecall on them is 0.5: of the 10% of slots" in card
    assert 'locret-infer long.txt --ckpt me/heads --question "' in card
    assert "R.PassKey" in card


def test_the_card_says_whether_validation_was_set_aside(tmp_path):
    source, said = save(tmp_path / "heads"), "no record with a document of theirs, and no 13 words in a row"
    training = json.loads((source / "training.json").read_text())
    training["data"]["sources"] = ["synthetic", "a/b"]
    for held in (None, 0, 8):
        (source / "training.json").write_text(json.dumps({**training, "set_aside": held}))
        write_release(make(), "me/heads", tmp_path / f"release{held}", source)
        card = (tmp_path / f"release{held}" / "README.md").read_text()
        assert ("Validation samples (8) were set aside before training" in card) == (said in card) == (held == 8)
    (source / "training.json").write_text(json.dumps({**training, "set_aside": 8, "heads": {"init": "/home/me/first"}}))
    write_release(make(), "me/heads", tmp_path / "release", source)
    card = (tmp_path / "release" / "README.md").read_text()
    assert "Further training of `first`: 4 steps" in card and "was trained on here; `first` may have seen them." in card


@pytest.mark.parametrize("name", ["lab/Tiny-GGUF:Q4_K_M", "lab/Tiny-GGUF/tiny-q4_k_m.gguf"])
@pytest.mark.parametrize("given", [None, "lab/Tiny-GGUF"])
def test_heads_of_a_gguf_file_of_the_hub_keep_its_name(tmp_path, name, given):
    """Either name is one that others load; the repository alone is not."""
    write_release(make(replace(CONFIG, backbone=name)), "me/heads", tmp_path, base_model=given)
    assert json.loads((tmp_path / "config.json").read_text())["backbone"] == name
    assert read_card(tmp_path / "README.md")[0]["base_model"] == "lab/Tiny-GGUF"


def test_heads_of_a_gguf_file_of_this_machine_need_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my" / "models").mkdir(parents=True)
    (tmp_path / "my" / "models" / "tiny.gguf").touch()
    heads = make(replace(CONFIG, backbone="my/models/tiny.gguf"))
    with pytest.raises(ValueError, match=r"others cannot load: give --base-model user/name"):
        write_release(heads, "me/heads", tmp_path / "r")
    write_release(heads, "me/heads", tmp_path / "r", base_model="lab/Tiny-GGUF:Q4_K_M")
    assert RetainingHeads.from_pretrained(str(tmp_path / "r")).config.backbone == "lab/Tiny-GGUF:Q4_K_M"
    assert read_card(tmp_path / "r" / "README.md")[0]["base_model"] == "lab/Tiny-GGUF"


@pytest.mark.parametrize(("status", "cached"), [(503, True), (429, True), (403, False)])
def test_what_was_loaded_once_still_loads_while_the_hub_is_down(tmp_path, monkeypatch, status, cached):
    """As the Hub's client does for models; a refusal is another thing."""
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    (tmp_path / "one.bin").touch()

    def snapshot(repo, *, local_files_only=False, **more):
        assert local_files_only
        return tmp_path

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("locret_kit.hub._file_names", Mock(side_effect=HfHubHTTPError("no", response=response)))
    if cached:
        assert hub.pull("lab/one", lambda names: names) == [tmp_path / "one.bin"]
    else:
        with pytest.raises(
            FileNotFoundError, match="ckpt='lab/one': not a local file, and the Hub says: the token may"
        ):
            hub.pull("lab/one", lambda names: names)


def test_no_local_path_is_published(tmp_path):
    source = save(tmp_path / "heads")
    training = json.loads((source / "training.json").read_text())
    training["data"]["sources"] += ["priv/acme/d.jsonl", "acme/e.jsonl", "/home/acme corp/f g.jsonl"]
    training |= {"out": "acme/run", "pool": {"policy": "h2o merge=lococo(/home/acme or so/pool)"}}
    (source / "training.json").write_text(json.dumps(training))
    error, policy = "OSError: '/home/acme/x' is gone", "h2o merge=lococo(/home/acme/pool)"
    row = {**ROWS[0], "model": "/home/acme/tiny", "adapter": "/home/acme/lora", "policy": policy, "error": error}
    (source / "results.jsonl").write_text(json.dumps(row))  # whole, though its end is missing
    heads = make(replace(CONFIG, backbone="/home/acme/tiny", inference={**INFERENCE, "policy": policy}))
    write_release(heads, "me/heads", tmp_path / "r", source, base_model="lab/tiny")
    for file in (tmp_path / "r").iterdir():
        assert b"acme" not in file.read_bytes(), file.name
    published = json.loads((tmp_path / "r" / "results.jsonl").read_text())
    told = [published[name] for name in ("model", "adapter", "policy")]
    assert told == ["lab/tiny", "lora", "h2o merge=lococo(pool)"]
    assert (
        "from synthetic, Some/Set, x.jsonl, d.jsonl, e.jsonl, f g.jsonl;" in (tmp_path / "r" / "README.md").read_text()
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", b"---\ntags: [a\n---\ntext"),
        ("README.md", b"---\ntags: !!python/object/apply:os.system [ls]\n---\ntext"),
        ("README.md", b"\xff\xfe"),
        ("training.json", b'{"optim": {}}'),
        ("results.jsonl", json.dumps({**ROWS[0], "score": "high"}).encode() + b"\n"),
    ],
)
def test_a_damaged_file_beside_the_heads_is_named_in_one_line(tmp_path, name, content):
    source = save(tmp_path / "heads")
    (source / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        write_release(make(), "me/heads", tmp_path / "r", source)
    assert name in str(caught.value) and str(source) in str(caught.value) and "\n" not in str(caught.value)


# ---- the real client against a local server -----------------------------------------------------------------------

ROUND_TRIP = """
import re
ckpt, work = sys.argv[1:]
os.environ.pop("HF_TOKEN")
dry = cli("publish", "--ckpt", ckpt, "--repo", "me/heads", "--private", "--dry-run")
os.environ["HF_TOKEN"] = "hf_me"
report(dry=dry, published=cli("publish", "--ckpt", ckpt, "--repo", "me/heads", "--message", "first"))
from huggingface_hub import list_repo_files, upload_file
for name in ("old.jsonl", "picture.svg"):
    upload_file(path_or_fileobj=b"", path_in_repo=name, repo_id="me/heads")
report(again=cli("publish", "--ckpt", ckpt, "--repo", "me/heads"))
report(names=sorted(list_repo_files("me/heads")), backbone=load("me/heads"), bin=load("old/heads", backbone="lab/tiny"))
text = "The harbour was quiet. The pass key is 12345. " * 12
report(infer=cli("infer", "--ckpt", "me/heads", "--max-new-tokens", "3", "--device", "cpu", stdin=text))
os.chdir(work)
open("long.txt", "w").write(text)
from huggingface_hub import hf_hub_download
snippet = re.search(r"```python\\n(.*?)```", open(hf_hub_download("me/heads", "README.md")).read(), re.S)[1]
out = io.StringIO()
with redirect_stdout(out):
    exec(snippet, names := {})
report(snippet=[names["cache"].get_seq_length(), names["ids"].shape[1], names["out"].shape[1]])
from pathlib import Path
from locret_kit.backbones import demo
demo.REPO = "lab/tiny"
made = demo.from_hub(Path(work) / "new")
report(fetched=sorted(p.name for p in made.iterdir()))
from locret_kit.backbones.load import load_backbone
plain, adapted = (load_backbone("lab/tiny", adapter=adapter)[0].model for adapter in (None, "lab/lora"))
report(adapted=bool((plain.layers[0].self_attn.q_proj.weight != adapted.layers[0].self_attn.q_proj.weight).any()))
from urllib.request import urlopen
urlopen(os.environ["HF_ENDPOINT"] + "/close").close()
"""

OUT_OF_REACH = """
from huggingface_hub import constants
from huggingface_hub.utils import _http
_http.time.sleep = lambda seconds: None  # between its tries
for constants.HF_HUB_OFFLINE in (False, True):
    publish = cli("publish", "--ckpt", ckpt, "--repo", "me/heads")
    report(**{str(constants.HF_HUB_OFFLINE): dict(cached=load("me/heads"), absent=load("me/absent"), publish=publish)})
"""

TROUBLES = """
ckpt = sys.argv[1]
def publish(repo, token, *more):
    os.environ["HF_TOKEN"] = token
    return cli("publish", "--ckpt", ckpt, "--repo", repo, *more)
os.environ.pop("HF_TOKEN", None)
report(no_token=cli("publish", "--ckpt", ckpt, "--repo", "me/new"))
report(open=publish("me/open", "hf_me", "--private"), license=publish("me/new", "hf_me", "--license", "MIT"))
report(theirs=publish("you/heads", "hf_me"), other=publish("me/model", "hf_me"), bad_name=publish("me", "hf_me"))
report(no_file=cli("publish", "--ckpt", ckpt + "x", "--repo", "me/new"), empty=publish("me/n", "hf_me", "--message", " "))
report(missing=load("you/none"), no_heads=load("me/model"))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The server's repositories and address, the published folder, and what one client reports of all its calls."""
    work = tmp_path_factory.mktemp("hub")
    ckpt, tiny = save(work / "heads"), save_tiny_backbone(work / "tiny")
    torch.save(state_of(make(), torch.bfloat16), work / "heads.bin")
    with HubServer() as hub:
        for name, folder in {"lab/tiny": tiny, "lab/lora": make_lora(tiny, work / "lora"), "you/heads": ckpt}.items():
            hub.add(name, {file.name: file.read_bytes() for file in folder.iterdir()})
        hub.add("old/heads", {"README.md": b"", "heads.bin": (work / "heads.bin").read_bytes()})
        hub.add("me/open", {})
        hub.add("me/model", {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}"})
        code = TROUBLES + ROUND_TRIP + OUT_OF_REACH
        return hub, ckpt, client(hub.url, work / "cache", code, str(ckpt), str(work), HF_TOKEN="hf_me")


def test_publish_list_download_infer(ran):
    hub, ckpt, said = ran
    repo = hub.repos["me/heads"]
    status, listing, err = said["dry"]
    assert (status, err) == (0, "")
    assert "would go to me/heads (private if it is new)" in listing and "base_model: lab/tiny" in listing
    size = (ckpt / "model.safetensors").stat().st_size
    assert re.search(rf"{size:,}  model\.safetensors", listing)
    assert said["published"][0] == said["again"][0] == 0, said
    assert "me/heads" in hub.private, "the owner's default decides"
    assert said["published"][1].strip() == f"{hub.url}/me/heads/commit/{repo[0][0]}"
    assert "old.jsonl" in repo[2][1] and len(repo) == 4, "a file that no longer exists goes; others stay"
    published = ["README.md", "config.json", "curves.csv", "model.safetensors", "results.jsonl", "training.json"]
    assert said["names"] == sorted([*published, "picture.svg"])
    assert repo[-1][1]["model.safetensors"] == (ckpt / "model.safetensors").read_bytes()
    assert said["backbone"] == said["bin"] == "lab/tiny"
    assert said["infer"][0] == 0 and "backbone: lab/tiny" in said["infer"][2], said["infer"]
    seen, prompt, total = said["snippet"]
    assert prompt > 64 and prompt < total <= prompt + 32 and seen >= prompt
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(said["fetched"]) and said["adapted"]


def test_without_the_server_what_was_loaded_once_still_loads(ran):
    """Offline or not; what was not loaded is one line."""
    hub, _, said = ran
    for offline, words in (("True", "offline mode is on"), ("False", f"{hub.url} cannot be reached")):
        found = said[offline]
        assert found["cached"] == "lab/tiny"
        assert "ckpt='me/absent': not a local file, and the Hub says:" in found["absent"] and words in found["absent"]
        status, out, err = found["publish"]
        assert (status, out) == (1, "") and err.count("\n") == 1
        assert err.startswith("locret-publish: repo='me/heads': nothing was published:") and words in err


def test_every_refusal_is_one_clear_line(ran):
    hub, _, said = ran
    for name, words in {
        "no_token": "repo='me/new': no Hub token: set HF_TOKEN or run `hf auth login`",
        "theirs": "the token may not write to you/heads: it belongs to someone else",
        "other": "it exists and holds something else (config.json, tokenizer.json); give another name",
        "open": "repo='me/open': nothing was published: it exists and is public: make it private there",
        "license": 'the upload did not end: Invalid metadata in README.md. - "license" must be one of [apache-2.0, mit]',
        "bad_name": "repo='me' must be user/name",
        "no_file": "no such file or folder",
        "empty": "message is empty: give it a value",
    }.items():
        status, out, err = said[name]
        assert (status, out, err.count("\n")) == (1, "", 1), (name, said[name])
        assert err.startswith("locret-publish: ") and words in err, (name, err)
    assert len(hub.repos["you/heads"]) == len(hub.repos["me/model"]) == 1
    assert "there is no you/none" in said["missing"]
    assert "holds neither model.safetensors nor one .bin" in said["no_heads"]
