"""The Triton kernels without a GPU: in Triton's interpreter against the portable path, and compiled for each kind of GPU. In
processes of their own: the interpreter is chosen when triton is imported."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CHECK = """
import math, os, numpy as np, torch
from node.optim.base import BaseConfig
from node.optim.demo import DeMo, DeMoConfig
from node.optim.step import NonFiniteGradient
from node.optim.digest import state_digest

torch.manual_seed(0)
SHAPES = [(66, 70), (64, 64), (3,), (128, 64), (), (64, 64)]
def peer(backend, size, beta2=0.0, base=BaseConfig()):
    import os
    os.environ["SWARMENTUM_OPTIM_BACKEND"] = backend
    demo = DeMo([(str(i), torch.nn.Parameter(torch.full(s, -0.0))) for i, s in enumerate(SHAPES)],
                DeMoConfig(group_size=size, weight_decay=0.1, beta2=beta2, base=base))
    assert demo.backend == backend
    return demo
REAL = BaseConfig("muon", block=64, iterations=3)
SIGNS = BaseConfig("muon", block=64, iterations=2, output="sign")
WAYS = ((8, 0.0), (16, 0.9), (32, 0.0, REAL), (64, 0.0), (128, 0.0, SIGNS), (128, 0.9))
from node.optim.backends import choose
from node.optim.votes.payload import Format
SIGN = BaseConfig()
for selection, cap, base in (("random", 7, REAL), ("random", 127, SIGN), ("independent", 2, SIGNS), ("slicing", 2, REAL),
                             ("full", 2, SIGN), ("groups", 3, REAL)):
    # what a GPU is asked before its kernels are used: as torch does it
    assert choose.triton_serves(torch.device("cpu"), Format(selection), base, cap), selection
for size, beta2, *base in WAYS:
    one, other, third = peer("triton", size, beta2, *base), peer("torch", size, beta2, *base), peer("torch", 128, 0.0, *base)
    for step in range(2):
        lr = float(np.float32(0.01 / (1 + step)))
        entry = []
        for number, demo in enumerate((one, other, third)):
            for i, parameter in enumerate(demo.parameters):
                generator = torch.Generator().manual_seed(100 * step + i + (7 if demo is third else 0))
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = None if i == 1 and step == 0 or i == 5 else gradient  # the last never has one: silent votes
            votes = demo.propose(lr)
            # the same votes as `select` makes of this peer's own momentum
            choice = demo.config.form.choose(demo.momentum.clone(), size if demo is not third else 128)
            assert votes.payload == demo.config.form.encode([choice], votes.size), (size, step, number)
            assert len(votes.payload) > demo.config.form.body_bytes(demo.layout.chunks, votes.size)
            entry.append((votes.size, votes.payload))
            demo.settle(True)
        assert torch.allclose(one.momentum, other.momentum, atol=1e-6)
        if beta2:
            pairs = zip(one.state_dict()["second"]["squares"], other.state_dict()["second"]["squares"], strict=True)
            assert all(torch.allclose(*pair, rtol=1e-5) for pair in pairs)
        for demo in (one, other, third):
            demo.apply(entry, lr)
            assert not demo.parameters[5].any(), "it has no gradient"
        assert len({state_digest(demo.parameters) for demo in (one, other, third)}) == 1, (size, step)
for demo in (one, other):
    demo.apply([], 0.5)
assert state_digest(one.parameters) == state_digest(other.parameters)
# parameters that are too small to keep
for demo in (one, other):
    demo.parameters[0].data[:3, :4] = torch.tensor([2.0**-101, -1e-40, 2.0**-100, -2.0**-99])
    demo.apply([], 0.5)
    small = demo.parameters[0].detach()[:3, :4]
    assert (small[:, :3] == 0).all() and (small[:, 3] < 0).all() and small[:, 1].signbit().all()
assert state_digest(one.parameters) == state_digest(other.parameters)
# random ballots, and those that reach the largest sums
random = np.random.default_rng(0)
for count in (1, 5, 40):
    drawn = random.choice((8, 32, 128), count).tolist()
    entry = [(g, random.bytes(one.config.form.body_bytes(one.layout.chunks, g))) for g in drawn]
    for demo in (one, other):
        demo.apply(entry, 0.25)
    assert state_digest(one.parameters) == state_digest(other.parameters), count
# a momentum in bf16: gradients that join it one by one give the votes of gradients that join it together
def saving():
    config = DeMoConfig(group_size=32, beta2=0.9, second_moment="factored", momentum_type="bf16")
    return DeMo([(str(i), torch.nn.Parameter(torch.zeros(s))) for i, s in enumerate(SHAPES)], config)
os.environ["SWARMENTUM_OPTIM_BACKEND"] = "triton"
whole, folded = saving(), saving()
os.environ["SWARMENTUM_OPTIM_BACKEND"] = "torch"
portable = saving()
assert (whole.backend, portable.backend) == ("triton", "torch")
for step in range(2):
    gradients = [torch.randn(s, generator=torch.Generator().manual_seed(step)) for s in SHAPES]
    for demo in (whole, portable):
        for parameter, gradient in zip(demo.parameters, gradients):
            parameter.grad = gradient.clone()
    folding = folded.folding(0.5)
    with folding.hooked():
        folding.start()
        folding.last(1)
        sum((p * g).sum() for p, g in zip(folded.parameters, gradients)).backward()
    folding.finish(1)
    one_by_one, together, _ = (demo.propose(0.5) for demo in (folded, whole, portable))
    assert one_by_one.payload == together.payload
    choice = whole.config.form.choose(whole.momentum.float(), 32)
    assert together.payload == whole.config.form.encode([choice], 32)
    for demo in (whole, folded, portable):
        demo.settle(False)
    assert folded.momentum.equal(whole.momentum) and whole.momentum.dtype == torch.bfloat16
    assert torch.allclose(whole.momentum.float(), portable.momentum.float(), atol=0.05)  # the interpreter cuts bf16 off
one.parameters[0].grad = torch.full(SHAPES[0], math.inf)
try:
    one.propose(0.5)
except NonFiniteGradient:
    print("all the same")
"""


COMPILE = """
import contextlib, io, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from node.optim.backends import triton as triton_step, triton_kernels, triton_wide

FORWARD = dict(addresses="*i64", rows="*i64", momentum="*fp32", basis="*fp32", codes="*u8", silent="*u8",
               broken="*i32", beta="fp32", step="fp32", squares="*i64", corrections="*i64", apart="*i64",
               beta2="fp32", rest="fp32", epsilon="fp32",
               GROUPS="constexpr", GROUP_SIZE="constexpr", PRECISION="constexpr", DIVIDES="constexpr", UNIT="constexpr")
INVERSE = dict(addresses="*i64", rows="*i64", ballots="*i64", silents="*i64", starts="*i32", turned="*i32",
               factor="fp32", lr="fp32", maps="*u8", DECAYS="constexpr", ITERATIONS="constexpr", SIGNS="constexpr",
               UNIT="constexpr")

SHARED = {name: kind for name, kind in FORWARD.items() if name not in ("codes", "GROUPS", "GROUP_SIZE")}
DRAWN = SHARED | dict(order="*i32", moved="*i32", negative="*u8", COUNT="constexpr")
WIDE = dict(addresses="*i64", rows="*i64", signs="*i64", silents="*i64", ranks="*i64", moves="*i64", shifts="*i32",
            high="*i32", low="*i32", count="i32", cap="i32", factor="fp32", lr="fp32", maps="*u8", DRAWN="constexpr",
            DECAYS="constexpr", ITERATIONS="constexpr", SIGNS="constexpr", UNIT="constexpr")

def spilled(kernel, signature, constants, capability, **options):
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        source, target = ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", capability, 32)
        triton.compile(source, target=target, options=options)
    return int(re.search(r"(\\d+) bytes spill stores", log.getvalue())[1])

for capability in map(int, sys.argv[1:]):
    precision, warps = triton_step.forward_options(divmod(capability, 10))
    constants = {"GROUPS": 32, "GROUP_SIZE": 128, "PRECISION": precision, "DIVIDES": True, "UNIT": 4}
    forward = spilled(triton_kernels.vote, FORWARD, constants, capability, num_warps=warps, enable_fp_fusion=True)
    short = {**FORWARD, "momentum": "*bf16"}
    forward += spilled(triton_kernels.vote, short, constants, capability, num_warps=warps, enable_fp_fusion=True)
    options = {"num_warps": triton_step.inverse_warps(divmod(capability, 10)), "enable_fp_fusion": False}
    constants = {"DECAYS": True, "ITERATIONS": 0, "SIGNS": False, "UNIT": 4}
    inverse = spilled(triton_kernels.apply, INVERSE, constants, capability, **options)
    drawn = {"COUNT": 1024, "PRECISION": precision, "DIVIDES": True, "UNIT": 4}
    forward += spilled(triton_wide.vote_drawn, DRAWN, drawn, capability, num_warps=warps, enable_fp_fusion=True)
    for iterations in (0, 2):
        constants |= {"DRAWN": True, "ITERATIONS": iterations}
        inverse += spilled(triton_wide.apply_wide, WIDE, constants, capability, **options)
    print(json.dumps([capability, forward, inverse]))
"""


def run(script: str, *arguments: str, **environment: str) -> str:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed (.ci/run installs it): pip install triton")
    command = (sys.executable, "-W", "error", "-c", script, *arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(900)
def test_kernels_in_the_interpreter_give_the_portable_paths_bits() -> None:
    assert run(CHECK, TRITON_INTERPRET="1") == "all the same\n"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpus", [(86, 90), pytest.param((80, 100, 120), marks=pytest.mark.nightly)])
def test_kernels_compile_for_every_kind_of_gpu_and_keep_their_numbers_in_registers(gpus: tuple[int, ...]) -> None:
    """One GPU of each kind of `forward_options` by day: each takes 16 s."""
    lines = run(COMPILE, *map(str, gpus), TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1").splitlines()
    spilled = {gpu: (forward, inverse) for gpu, forward, inverse in map(json.loads, lines)}
    assert spilled == dict.fromkeys(gpus, (0, 0))
