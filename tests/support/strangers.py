"""Pieces that several tests of attach share."""

import torch


def tokens(length, batch=1, seed=0):
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def fingerprint(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return model.config._attn_implementation, hooks, sorted(model.state_dict())
