"""What SGLang's ranks get and compute, without SGLang: the tensor that is a call, cuts, keys of prefixes."""

import base64
import pickle
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from node.engines.sglang.plugin.swarm_sglang import requests  # noqa: E402
from node.engines.sglang.plugin.swarm_sglang.calls import TENSOR, Call, as_tensors, decoded  # noqa: E402
from node.engines.sglang.plugin.swarm_sglang.cuts import inside, nucleus  # noqa: E402


@pytest.mark.parametrize("path", ["/s", "/" + "long/" * 18 + "s", "/ünï"])
def test_a_call_arrives_as_one_tensor(path: str):
    call = Call("connect", 7, path, driver=path, fill=True, version="3.14")
    ((name, tensor),) = pickle.loads(base64.b64decode(as_tensors(call)))
    assert (name, tensor.dtype) == (TENSOR, torch.uint8)
    assert decoded(bytes(tensor.tolist())) == call


def test_the_pickle_names_nothing_but_a_constructor_of_torch():
    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str):
            assert (module, name) == ("torch", "ByteTensor")
            return super().find_class(module, name)

    import io

    Reader(io.BytesIO(base64.b64decode(as_tensors(Call("name", 1, "/a"))))).load()


def test_cuts_leave_the_likeliest_tokens():
    logprobs = torch.tensor([[0.1, 0.5, 0.25, 0.15], [0.25, 0.25, 0.25, 0.25]]).log()
    many, all_of_it = torch.tensor([4, 4]), torch.tensor([1.0, 1.0])

    def kept(top_ks=many, top_ps=all_of_it, min_ps=None) -> list[list[int]]:
        return [row.nonzero()[:, 0].tolist() for row in inside(logprobs, top_ks, top_ps, min_ps)]

    assert kept() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert kept(top_ks=torch.tensor([1, 2])) == [[1], [0, 1]]
    assert kept(top_ps=torch.tensor([0.7, 0.5])) == [[1, 2], [0, 1]]
    assert kept(top_ps=torch.tensor([1e-6, 1e-6])) == [[1], [0]]
    assert kept(min_ps=torch.tensor([0.4, 1.0])) == [[1, 2], [0, 1, 2, 3]]


def test_a_nucleus_is_of_what_other_cuts_have_left():
    logprobs = torch.tensor([[0.1, 0.5, 0.25, 0.15]]).log()
    assert nucleus(logprobs, 1.0) is logprobs
    assert (nucleus(logprobs, 0.7) > -torch.inf).tolist() == [[False, True, True, False]]
    left = logprobs.masked_fill(torch.tensor([[True, False, False, True]]), -torch.inf)
    assert (nucleus(left, 0.6) > -torch.inf).tolist() == [[False, True, False, False]]


def test_every_request_is_keyed_by_the_version_and_those_that_wait_anew(monkeypatch: pytest.MonkeyPatch):
    waiting = [SimpleNamespace(extra_key=None), SimpleNamespace(extra_key="lora-1")]
    monkeypatch.setattr(requests, "_scheduler", SimpleNamespace(waiting_queue=waiting))
    monkeypatch.setattr(requests, "_key", "")
    monkeypatch.setattr(requests, "_names", 0)
    requests.name_prefixes("0.1")
    keys = [request.extra_key for request in waiting]
    assert keys[1] == f"lora-1|{keys[0]}"
    later = SimpleNamespace(extra_key="user")
    requests._key_request(None, later)
    assert later.extra_key == f"user|{keys[0]}"
    requests.name_prefixes("0.2")
    assert waiting[0].extra_key not in (*keys, None)
    assert waiting[1].extra_key == f"lora-1|{waiting[0].extra_key}"
    requests.name_prefixes("0.2")
    assert waiting[0].extra_key != later.extra_key, "a version that is loaded anew is another one to the cache"
