"""Parameters in flight: reads past their modules are refused, and what is compiled waits."""

import pytest
import torch
from nets import TINY_MB, backward, inputs, make_gathers_late, net, same_under_both, wrap
from ranks import run_ranks


def late_reads():
    """A gradient of a parameter that was read through a reference taken before step, past its module, is refused."""
    make_gathers_late()
    module = net()
    model, optimizer = wrap(module, overlap=True)
    references = list(module.parameters())
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"2\.weight has a gradient, but its all-gather was never waited for"):
        (inputs() @ references[2].t()).sum().backward()
    optimizer.zero_grad()
    assert model(inputs()).isfinite().all()
    assert all(param.isfinite().all() for param in references)
    return True


def test_a_gradient_of_a_read_past_the_module_is_refused():
    run_ranks(late_reads, 2)


def compiled(how):
    def trains(wrap):
        module = net()
        inner = torch.compile(module, backend="eager") if how == "module before wrapping" else module
        if how == "child":
            module[0].compile(backend="eager")
        model, optimizer = wrap(inner)
        call = model
        if how == "wrapper":
            call = torch.compile(model, backend="eager")
        elif how == "function":
            call = torch.compile(lambda x: model(x), backend="eager")
        elif how == "child after wrapping":
            module[2].compile(backend="eager")
        for step in range(4):
            backward(call, step)
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in module.parameters()]

    return trains


def all_compiled(bucket_mb, overlap):
    make_gathers_late()
    hows = ("module before wrapping", "child", "wrapper", "function", "child after wrapping")
    return {how: same_under_both(compiled(how), bucket_mb, overlap) for how in hows}


@pytest.mark.parametrize(("bucket_mb", "overlap"), [(75, True), (TINY_MB, True), (TINY_MB, False)])
def test_what_is_compiled_waits_too(bucket_mb, overlap):
    for differences in run_ranks(all_compiled, 2, bucket_mb, overlap):
        assert differences == dict.fromkeys(differences, pytest.approx(0, abs=1e-6))
