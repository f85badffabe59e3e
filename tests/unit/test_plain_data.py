"""Tensors that wrap others, as torchao's 8-bit states do, go into a checkpoint and come out of it again."""

import re
from pathlib import Path
from typing import Any

import dcp_checkpoints
import pytest
import torch
from torch import Tensor

from loco.checkpoints import dcp_format, formats
from loco.checkpoints.formats import host_copy, opened
from loco.checkpoints.plain_data import as_plain_data, from_plain_data


class Scaled(Tensor):
    """Codes and one scale."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool) -> "Scaled":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # pyright: ignore

    def __init__(self, codes: Tensor, scale: Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.signed]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], attributes: list[Any], *_: Any) -> "Scaled":
        return Scaled(inner["codes"], inner["scale"], *attributes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)  # none is needed to save it


def made() -> dict[str, Any]:
    held = Scaled(torch.arange(6, dtype=torch.uint8).view(2, 3), torch.tensor([0.5]), True)
    return {"state": {0: {"exp_avg": held, "step": torch.tensor(3.0)}}}


@pytest.mark.parametrize(
    ("write", "read"), [(formats.write, formats.read), (dcp_checkpoints.write, dcp_format.read)]
)
def test_a_registered_type_comes_back_with_its_bits(write: Any, read: Any, tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Scaled]):
        write(host_copy(as_plain_data(made(), [])), tmp_path)
        found = from_plain_data(read(lambda name: opened(tmp_path / name)), [])["state"][0]
    before, after = made()["state"][0]["exp_avg"], found["exp_avg"]
    assert type(after) is Scaled
    assert (after.shape, after.signed) == (before.shape, True)
    assert torch.equal(after.codes, before.codes)
    assert torch.equal(after.scale, before.scale)
    assert found["step"] == 3.0


def test_a_type_that_could_not_be_loaded_is_not_saved() -> None:
    with pytest.raises(ValueError, match=re.escape(f"of type {__name__}.Scaled")):
        as_plain_data(made(), [])


def test_a_type_that_this_program_lacks_is_named_and_not_imported() -> None:
    with torch.serialization.safe_globals([Scaled]):
        plain = as_plain_data(made(), [])
    with pytest.raises(ValueError, match="import the library that it comes from"):
        from_plain_data(plain, [])
    plain["state"][0]["exp_avg"]["type"] = "os.system"
    with pytest.raises(ValueError, match=r"a state holds a tensor of type os\.system"):
        from_plain_data(plain, [])


@pytest.mark.parametrize("lacks", ["inner", "attributes", "shape", "type"])
def test_a_damaged_one_is_named(lacks: str) -> None:
    with torch.serialization.safe_globals([Scaled]):
        plain = as_plain_data(made(), [])
        del plain["state"][0]["exp_avg"][lacks]
        with pytest.raises(ValueError, match="a tensor that can't be put together"):
            from_plain_data(plain, [])
