"""The torch reader executes nothing: attacks are refused, by the name of what they ask for, and leave no trace."""

import collections
import io
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from refplan.errors import RefplanError
from refplan.priors.external import load_policy
from refplan.priors.foreign import torch_file
from refplan.priors.foreign.torch_file import Stub, load_plain_pickle, load_torch, open_zip, read_bytes

FOLDER = Path(__file__).parent / "fixtures" / "policies"


class Call:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def attacks(marker):
    command = f"touch {marker}"
    return {
        "posix.system": Call(os.system, command),
        "builtins.eval": Call(eval, f"__import__('os').system({command!r})"),
        "builtins.exec": Call(exec, f"open({str(marker)!r}, 'w').close()"),
        "subprocess.Popen": Call(subprocess.Popen, ["touch", str(marker)]),
        "subprocess.check_output": Call(subprocess.check_output, ["touch", str(marker)]),
        "builtins.getattr": Call(getattr, "x", "upper"),
        "shutil.rmtree": Call(shutil.rmtree, str(marker.parent / "nothing")),
        "torch.load": b"ctorch\nload\n(S'x'\ntR.",
        "torch.storage._load_from_bytes": b"ctorch.storage\n_load_from_bytes\n(S'x'\ntR.",
        "refplan.modules.load_module": b"crefplan.modules\nload_module\n(S'x'\ntR.",
        "collections.OrderedDict.__init__": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93)R.",
    }


def pickled(attack):
    return attack if isinstance(attack, bytes) else pickle.dumps({"actor": attack})


def torch_zip(data, **members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for name, content in members.items():
            archive.writestr(f"archive/data/{name.removeprefix('s')}", content)
    return buffer.getvalue()


NAMES = sorted(attacks(Path("x")))


@pytest.fixture
def marker(tmp_path):
    path = tmp_path / "marker"
    yield path
    assert not path.exists(), "the attack was executed"


def test_the_attacks_are_real(tmp_path):
    for name in ("posix.system", "builtins.eval", "builtins.exec", "subprocess.check_output"):
        path = tmp_path / name
        pickle.loads(pickled(attacks(path)[name]))
        assert path.exists()


@pytest.mark.parametrize("name", NAMES)
def test_attack_in_a_d3_file(name, marker, tmp_path):
    path = tmp_path / "x.d3"
    path.write_bytes(b"\x80\x02" + pickled(attacks(marker)[name]).removeprefix(b"\x80\x04"))
    with pytest.raises(RefplanError, match=rf"refused.*'{name}'"):
        load_policy(path)


@pytest.mark.parametrize("name", NAMES)
def test_attack_in_the_torch_part_of_a_d3_file(name, marker, tmp_path):
    outer = pickle.loads((FOLDER / "d3rlpy_cql.d3").read_bytes())  # our own fixture
    path = tmp_path / "x.d3"
    path.write_bytes(pickle.dumps({**outer, "torch": torch_zip(pickled(attacks(marker)[name]))}))
    with pytest.raises(RefplanError, match=rf"refused.*'{name}'"):
        load_policy(path)


@pytest.mark.parametrize("name", NAMES)
def test_attack_in_an_sb3_zip(name, marker, tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(FOLDER / "sb3_sac.zip") as old, zipfile.ZipFile(path, "w") as new:
        new.writestr("data", old.read("data"))
        new.writestr("policy.pth", torch_zip(pickled(attacks(marker)[name])))
    with pytest.raises(RefplanError, match=rf"refused.*'{name}'"):
        load_policy(path)


@pytest.mark.parametrize("name", NAMES)
def test_attack_in_a_corl_checkpoint_becomes_an_inert_stub(name, marker, tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(torch_zip(pickled(attacks(marker)[name])))
    with pytest.raises(RefplanError):
        load_policy(path, low=-1.0, high=1.0)


def test_stubs_keep_arguments_and_state_and_do_nothing(marker):
    read = load_torch(torch_zip(pickled(attacks(marker)["posix.system"])), "x.pt", stubs=True)
    stub = read["actor"]
    assert isinstance(stub, Stub) and stub.name == "posix.system" and stub.arguments == (f"touch {marker}",)
    scalar = load_torch((FOLDER / "corl_cql.pt").read_bytes(), "x", stubs=True)["sac_log_alpha"]
    assert scalar.name == "__main__.Scalar"
    assert float(scalar.state["_parameters"]["constant"]) == 0.0


def test_corl_module_is_refused_without_stubs():
    with pytest.raises(RefplanError, match=r"refused.*'__main__\.Scalar'"):
        load_torch((FOLDER / "corl_cql.pt").read_bytes(), "x.pt")


def test_lent_functions_cannot_be_changed():
    """BUILD with a slot state is pickle's way to set attributes of any object it can reach."""
    for name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
        data = f"ctorch._utils\n{name}\n(N}}S'function'\nNstb.".encode()
        with pytest.raises(RefplanError, match="tries to change a function"):
            load_torch(torch_zip(data), "x.pt")
        data = f"ctorch._utils\n{name}\n}}S'function'\nNsb.".encode()
        with pytest.raises(RefplanError, match="cannot be read"):
            load_torch(torch_zip(data), "x.pt")
    data = b"ccollections\nOrderedDict\n(N}S'update'\nNstb."
    with pytest.raises(RefplanError, match="cannot be read"):
        load_torch(torch_zip(data), "x.pt")
    assert callable(collections.OrderedDict.update)


def tensor_pickle(numel, offset, shape, stride, storage="FloatStorage"):
    """The pickle of one tensor, as torch writes it, on the storage '0'."""
    pid = f"(S'storage'\nctorch\n{storage}\nS'0'\nS'cpu'\nI{numel}\ntQ"
    numbers = "".join("(" + "".join(f"I{n}\n" for n in each) + "t" for each in (shape, stride))
    return (
        f"ctorch._utils\n_rebuild_tensor_v2\n({pid}I{offset}\n{numbers}I00\nccollections\nOrderedDict\n)RtR.".encode()
    )


def test_tensors_are_views_with_shape_and_strides():
    raw = np.arange(12, dtype=np.float32)
    read = load_torch(torch_zip(tensor_pickle(12, 1, (2, 3), (1, 3)), s0=raw.tobytes()), "x.pt")
    np.testing.assert_array_equal(read, np.array([[1, 4, 7], [2, 5, 8]], np.float32))
    half = load_torch(torch_zip(tensor_pickle(2, 0, (2,), (1,), "BFloat16Storage"), s0=b"\x80\x3f\x00\xc0"), "x.pt")
    np.testing.assert_array_equal(half.astype(np.float32), [1.0, -2.0])


@pytest.mark.parametrize(
    ("numel", "offset", "shape", "stride"),
    [
        (4, 0, (5,), (1,)),
        (4, 1, (4,), (1,)),
        (4, 0, (2, 2), (4, 1)),
        (4, 0, (10**12,), (0,)),
        (4, -1, (2,), (1,)),
        (4, 0, (2,), (-1,)),
        (400, 0, (400,), (1,)),
        (4, 0, (2, 2), (1,)),
        (-1, 0, (100,), (1,)),
    ],
)
def test_tensors_that_reach_outside_their_storage_are_refused(numel, offset, shape, stride):
    data = torch_zip(tensor_pickle(numel, offset, shape, stride), s0=bytes(16))
    with pytest.raises(RefplanError, match="cannot be read"):
        load_torch(data, "x.pt")


def test_memory_bombs_in_pickles_are_refused():
    for data in (
        b"\x80\x02Nr" + struct.pack("<I", 0x7FFFFFFF) + b".",  # a memo slot that would need a table of 17 GB
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",  # a byte string said to be an exabyte long
        b"\x80\x02\x82\x01.",  # an extension code
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b".",  # a frame said to be an exabyte long
    ):
        with pytest.raises(RefplanError, match="cannot be read"):
            load_plain_pickle(data, "x.d3")


def test_zip_bombs_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_file, "LIMIT", 1000)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2000))
    assert len(buffer.getvalue()) < 1000
    with pytest.raises(RefplanError, match=r"would unpack to 2000 bytes \(limit 1000\)"):
        open_zip(buffer.getvalue(), "x.pt")
    (tmp_path / "x").write_bytes(bytes(1001))
    with pytest.raises(RefplanError, match="1001 bytes are too many"):
        read_bytes(tmp_path / "x")


def test_foreign_and_damaged_files_have_clear_errors(tmp_path):
    good = torch_zip(tensor_pickle(4, 0, (4,), (1,)), s0=bytes(16))
    program = io.BytesIO(good)
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr("archive/constants.pkl", b"")
    other = io.BytesIO(good)
    with zipfile.ZipFile(other, "a") as archive:
        archive.writestr("archive/byteorder", b"big")
    for data, message in (
        (b"hello", "not a torch zip file"),
        (pickle.dumps({}), "before torch 1.6"),
        (good[:-10], "not a readable zip"),
        (torch_zip(b"hello"), "pickle cannot be read"),
        (torch_zip(tensor_pickle(4, 0, (4,), (1,))), "pickle cannot be read.*data/0"),
        (torch_zip(tensor_pickle(4, 0, (4,), (1,), "UntypedStorage"), s0=bytes(16)), "'torch.UntypedStorage'"),
        (program.getvalue(), "TorchScript"),
        (other.getvalue(), "big-endian"),
    ):
        with pytest.raises(RefplanError, match=message):
            load_torch(data, "x.pt")
    with pytest.raises(RefplanError, match="no such file"):
        read_bytes(tmp_path / "missing")
