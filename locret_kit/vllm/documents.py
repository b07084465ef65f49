"""Documents read once, by vLLM's connector: a prompt that begins with a document that ``locret-read`` made takes its page from
the file, and reads the rest.

The scheduler's side compares tokens, and says which document goes into which page; each worker's side fills the page before the
forward. A document stands in for a fresh run only where that would have evicted the same so far, see ``cache.fork``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.model_executor.layers.attention import Attention

from ..documents.document import IDS
from ..engine import BoundedCache, CacheFile, CannotFork
from ..naming import prefixed_errors
from ..policies.grammar import parts_of
from .worker import RequestInfo, Worker, server_of, worker_here

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


MAX_LOADED = 8
"""Documents that a worker keeps in memory at most."""
SHARED = ("budget", "chunk", "stabilizers", "positions", "protect", "decode_every", "seed")
"""Settings that a request must share with a document."""


@dataclass
class Load:
    """A document that goes into a request's page."""

    path: str
    page: int
    info: RequestInfo


@dataclass
class Loads(base.KVConnectorMetadata):
    """Documents that go into pages in one step."""

    loads: list[Load] = field(default_factory=list)


@dataclass
class LibraryDocument:
    """A document as the scheduler needs it."""

    path: str
    ids: list[int]
    """Tokens that were read into it."""
    cache: BoundedCache
    """Cache before these tokens: without rows."""


def info_of(request: Request) -> RequestInfo:
    """A request of vLLM's, as workers read it."""
    params = request.sampling_params
    return RequestInfo(len(request.prompt_token_ids or ()), (params and params.extra_args) or {})


def difference(there: BoundedCache, here: BoundedCache) -> str | None:
    """The first setting that differs between a document and a request, in words; None without a difference."""
    for name in SHARED:
        theirs, ours = getattr(there.settings, name), getattr(here.settings, name)
        if theirs != ours:
            return f"{name}: {theirs} in the file, {ours} here"
    return None


class Documents(base.KVConnectorBase_V1, base.SupportsHMA):
    """vLLM makes one for the scheduler and one for each worker.

    Raises:
        ValueError: weights that have no identity, or the folder holds a document that this server cannot use; the first
            difference is named.
    """

    def __init__(self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.loads: list[Load] = []
        scheduler = role == base.KVConnectorRole.SCHEDULER
        self.server = server_of(vllm_config) if scheduler else worker_here().server
        if self.server.section.documents is None:
            raise ValueError("the connector of documents needs a folder: documents=... in the section locret")
        reader = Worker.of(self.server, vllm_config.model_config, torch.device("cpu"))
        self.worker = reader if scheduler else worker_here()
        self.model = reader.pages.model
        self.origin = CacheFile.origin(self.model, self.server.heads)  # type: ignore[arg-type]
        self.library = [self._listed(str(path)) for path in self.server.documents if scheduler]
        # Open, so that a file that is removed or replaced later ends no engine.
        files = {str(path): path.open("rb") for path in self.server.documents if not scheduler}
        self._loaded = lru_cache(MAX_LOADED)(lambda path: self._read(f"/dev/fd/{files[path].fileno()}")[0])

    def _read(self, path: str) -> tuple[BoundedCache, list[int]]:
        """A document's cache in the host's memory, and the tokens that it has read.

        Raises:
            OSError: there is no such file. ValueError: it is damaged, of another model, or was saved without its text.
        """
        file = CacheFile.read(path)
        heads = self.server.heads if file.saved.heads else None
        cache = file.restore(self.model, heads, origin=self.origin)  # type: ignore[arg-type]
        ids = file.apart.get(IDS)
        with prefixed_errors(path, ValueError):
            if ids is None or cache.get_seq_length() > len(ids):
                raise ValueError("it was saved without its text, so nobody can say which prompts begin with it")
        return cache, ids[: cache.get_seq_length()].tolist()

    def _listed(self, path: str) -> LibraryDocument:
        """A document of the folder; what its settings have in common with the server's is checked."""
        (cache, ids), policies = self._read(path), self.server.policies
        name = next((name for name, policy in policies.items() if parts_of(policy) == parts_of(cache.policy)), None)
        with prefixed_errors(path, ValueError):
            if name is None:
                raise ValueError(f"policy={cache.policy.name!r} in the file, here {', '.join(policies)}")
            if words := difference(cache, self.worker.text(RequestInfo(len(ids) + 1, {"policy": name}))):
                raise ValueError(words)
        unread = BoundedCache(cache.run, cache.policy, cache.heads, prompt_length=cache.schedule.prompt_length)
        return LibraryDocument(path, ids, self.worker.pages.bind(unread))

    def _fits(self, document: LibraryDocument, prompt: list[int], info: RequestInfo) -> bool:
        """Whether a fresh run of a prompt would be where the document is, after its tokens."""
        seen = len(document.ids)
        if not seen < len(prompt) or prompt[:seen] != document.ids:
            return False
        here, there = self.worker.text(info), document.cache
        if difference(there, here) or parts_of(here.policy) != parts_of(there.policy):
            return False
        try:
            there.state.check_fork(here.state, seen)
        except CannotFork:
            return False
        return True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Number of tokens of the longest document that the prompt starts with."""
        best = self._best(request)
        return (0, False) if best is None or num_computed_tokens else (len(best.ids), False)

    def _best(self, request: Request) -> LibraryDocument | None:
        prompt, info = list(request.prompt_token_ids or ()), info_of(request)
        fitting = (document for document in self.library if self._fits(document, prompt, info))
        return max(fitting, key=lambda document: len(document.ids), default=None)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note the document for a request's page."""
        if num_external_tokens and (best := self._best(request)) is not None:
            self.loads.append(Load(best.path, blocks.get_block_ids()[0][0], info_of(request)))

    def build_connector_meta(self, scheduler_output: object) -> Loads:
        """Documents for workers to load before the next forward."""
        loads, self.loads = Loads(self.loads), []
        return loads

    def request_finished_all_groups(self, request: Request, block_ids: object) -> tuple[bool, None]:
        """Nothing is kept of a request."""
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the pages of every layer, of shape [pages, ...]."""
        layers = get_layers_from_vllm_config(self._vllm_config, Attention)
        self.layers = {layer.impl.number: kv_caches[name] for name, layer in layers.items()}

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        """Fill the pages of requests that start with a document."""
        for load in self._get_connector_metadata().loads:  # type: ignore[attr-defined]
            self.worker.pages.take(load.page, self.worker.text(load.info), self._loaded(load.path), self.layers)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is left to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: object) -> None:
        """Does nothing, for a layer of any shape: ``locret-read`` makes the documents."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""
