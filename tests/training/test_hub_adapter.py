"""Heads for a backbone with a LoRA, from training to another machine: publish, load by name, answer as at home."""

from __future__ import annotations

import io
import json
import sys

import yaml
from hub_client import client
from hub_server import HubServer
from tiny_lora import make_lora
from tiny_tokenizer import save_tiny_backbone

from locret_kit.cli import infer
from locret_kit.cli.train import main as train

TEXT = "The harbour was quiet when the boats came in. The pass key is 12345. " * 20
FLAGS = ["--device", "cpu", "--dtype", "float32", "--max-new-tokens", "12", "--budget", "64", "--quiet"]

ELSEWHERE = """
ckpt, text, *flags = sys.argv[1:]
names = ["--base-model", "lab/tiny", "--adapter", "lab/lora"]
report(unnamed=cli("publish", "--ckpt", ckpt, "--repo", "me/heads", *names[:2]))
report(published=cli("publish", "--ckpt", ckpt, "--repo", "me/heads", *names))
report(answer=cli("infer", "--ckpt", "me/heads", *flags, stdin=text))
report(bare=cli("infer", "--ckpt", "me/heads", "--adapter", "none", *flags, stdin=text))
report(lost=cli("publish", "--ckpt", ckpt, "--repo", "me/lost", *names[:3], "lab/nothing"))
report(without=cli("infer", "--ckpt", "me/lost", *flags, stdin=text))
"""


def test_train_publish_load_and_answer_with_a_lora(tmp_path, monkeypatch, capsys):
    backbone = save_tiny_backbone(tmp_path / "backbone")
    lora = make_lora(backbone, tmp_path / "lora")
    places = [f"backbone.model={backbone}", f"backbone.adapter={lora}", f"out={tmp_path / 'run'}"]
    assert train(["recipe=tiny", "trainer.accelerator=cpu", "data.max_tokens=384", "optim.steps=3", *places]) == 0
    heads = tmp_path / "run" / "heads"
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert infer.main(["--ckpt", str(heads), *FLAGS]) == 0
    at_home = capsys.readouterr().out
    with HubServer() as hub:
        for name, folder in (("lab/tiny", backbone), ("lab/lora", lora)):
            hub.add(name, {file.name: file.read_bytes() for file in folder.iterdir()})
        said = client(hub.url, tmp_path / "cache", ELSEWHERE, str(heads), TEXT, *FLAGS, HF_TOKEN="hf_me")
        files = hub.repos["me/heads"][-1][1]
    assert said["unnamed"][0] == 1 and "others cannot load: give --adapter user/name" in said["unnamed"][2]
    assert said["published"][0] == 0, said["published"]
    status, answer, err = said["answer"]
    assert (status, answer) == (0, at_home) and at_home.strip() and "the heads were trained" not in err
    status, other, err = said["bare"]
    assert status == 0 and other != at_home
    assert err == (
        "warning: the heads were trained with adapter='lab/lora', and this runs without it: their scores may be off\n"
    )
    assert said["lost"][0] == 0
    status, out, err = said["without"]
    assert (status, out, err.count("\n")) == (1, "", 1) and "adapter='lab/nothing' cannot be put on" in err
    config, settings = (json.loads(files[name]) for name in ("config.json", "training.json"))
    assert (config["backbone"], config["adapter"]) == ("lab/tiny", "lab/lora")
    assert str(tmp_path) not in json.dumps([config, settings])
    card = files["README.md"].decode()
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == "lab/tiny"
    assert 'load_backbone("lab/tiny", adapter="lab/lora")' in card and str(tmp_path) not in card
