"""Products that a backbone's linear modules compute, as plain matrices."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from .decoder_modules import is_untouched
from .gguf.gguf_model import PackedLinear, packed_product

PLAIN = (Tensor, nn.Parameter)
"""Types of plain weights."""


class NotDense(ValueError):
    """The decoder is not of the known form. The message says how it differs."""


class Product(NamedTuple):
    """``x @ weight.T + bias``.

    Attributes:
        form: format of a packed matrix; None of a plain one.
    """

    weight: Tensor
    bias: Tensor | None
    form: str | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The product [..., N] of ``x`` [..., C] with the matrix."""
        if self.form is None:
            return F.linear(x, self.weight, self.bias)
        return packed_product(x, self.weight, self.form, self.bias)


def projections(attention: Any) -> list[Product]:
    """Products of a layer's normed input that are queries, keys and values.

    Raises:
        NotDense: modules that were exchanged. AttributeError: projections of other names.
    """
    if not hasattr(attention, "qkv_proj"):
        return [product_of(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")]
    Q, D, both = attention.config.num_attention_heads, attention.head_dim, product_of(attention.qkv_proj)
    H = (len(both.weight) // D - Q) // 2
    return pieces(both, (Q * D, H * D, H * D))


def plain_projections(attention: nn.Module | None) -> list[Product] | None:
    """Projections of an attention; None of adapters, hooks, weights packed or of another library, norms of queries and keys."""
    if attention is None:
        return None
    linears = [module for module in attention.children() if isinstance(module, nn.Linear)]
    plain = all(is_untouched(one) and type(one.weight) in PLAIN for one in linears) and not hasattr(attention, "q_norm")
    try:
        found = projections(attention) if plain else []
    except (NotDense, AttributeError):
        return None
    return found if found and all(one.form is None for one in found) else None


def product_of(module: Any) -> Product:
    """Product of a module. Raises NotDense where it is another library's."""
    if type(module) not in (PackedLinear, nn.Linear):
        raise NotDense(f"a {type(module).__name__} among its matrices")
    bias = None if module.bias is None else module.bias.detach()
    return Product(module.weight.detach(), bias, getattr(module, "form", None))


def pieces(both: Product, rows: tuple[int, ...]) -> list[Product]:
    """Products of the parts of a matrix, with ``rows[i]`` rows each."""
    biases = both.bias.split(rows) if both.bias is not None else [None] * len(rows)
    parts = zip(both.weight.split(rows), biases, strict=True)
    return [Product(weight, bias, both.form) for weight, bias in parts]
