"""The text of the stand-alone script of a finding, which :mod:`verifier.script` fills in by ``str.format``."""

from __future__ import annotations

__all__ = ["MEMORY", "STRIDED_IMPORT", "TEMPLATE"]

TEMPLATE = '''\
"""{title}

Needs {needs}. Exit status 1 if the defect is there, 0 if it is not, 2 if that is undecided.
Seen on torch {version}; {mesh_text}.
"""

from __future__ import annotations

import os
{resource_import}import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
{imports}
MESH = {mesh}
DEVICE = "{device}"
BACKEND = "{backend}"

# The whole tensors, their placements (one per mesh dim), and what each rank holds of them.
GLOBAL = {{
{globals_text}
}}
PLACEMENTS = {{
{placements_text}
}}
LOCAL = {{
{locals_text}
}}

{memory_text}{source}
def call({parameters}):
    return {call_text}


def tensors(result):
    return [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]


def with_written(result, written):
    """The tensors of a result, and the arguments that the op writes to without returning them."""
    found = tensors(result)
    return [*found, *(t for t in written if not any(t is f for f in found))]


def place(name, rank, mesh):
    whole = GLOBAL[name]
    part = LOCAL[name][rank].to(DEVICE)
    result = DTensor.from_local(part, mesh, PLACEMENTS[name], run_check=False, shape=whole.shape, stride=whole.stride())
    return result.requires_grad_(whole.requires_grad)


def cut(whole, dim, parts):
    """The pieces of a tensor, as torch.chunk cuts it, and empty ones up to that number."""
    size = whole.shape[dim]
    width = -(-size // parts)
    starts = [min(index * width, size) for index in range(parts)]
    return [whole.narrow(dim, start, min(width, size - start)) for start in starts]


def promised(whole, placements, rank):
    """What the rank must hold of a tensor that is replicated or sharded; None if it is Partial in any way."""
    coordinate, rest = [], rank
    for extent in reversed(MESH):
        coordinate.insert(0, rest % extent)
        rest //= extent
    for placement, extent, index in zip(placements, MESH, coordinate):
        if type(placement) is Shard:
            whole = cut(whole, placement.dim, extent)[index]
        elif hasattr(placement, "split_factor"):
            pieces = cut(whole, placement.dim, placement.split_factor)
            whole = torch.cat([cut(piece, placement.dim, extent)[index] for piece in pieces], placement.dim)
        elif type(placement) is not Replicate:
            return None
    return whole


def differs(got, expected, absolute):
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return True
    return not torch.allclose(got, expected, rtol=0.0, atol=absolute, equal_nan=True)


def announce(answers, results, rank):
    """Tell what this rank's results are placed as, before a collective in which ranks that disagree may hang."""
    answers.put((rank, "placements", [str(t.placements) if isinstance(t, DTensor) else "" for t in results]))


def local_part(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(what, got, expected, absolute, rank):
    if not isinstance(got, DTensor):
        return [f"{{what}}: is a plain tensor, expected a DTensor"]
    problems = []
    if got.shape != expected.shape:
        problems.append(f"{{what}}: has shape {{list(got.shape)}}, expected {{list(expected.shape)}}")
    part = promised(expected, got.placements, rank)
    if part is not None and differs(got.to_local().cpu(), part, absolute):
        problems.append(f"{{what}}: rank {{rank}} holds {{got.to_local().tolist()}}, expected {{part.tolist()}}")
    whole = got.full_tensor().cpu()
    if differs(whole, expected, absolute):
        problems.append(f"{{what}}: gathered {{whole.tolist()}}, expected {{expected.tolist()}}")
    return problems


def expected_results():
    wholes = {{n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in GLOBAL.items()}}
    try:
        results = tensors(call(**wholes))
    except Exception as error:
        return None, None, None, error
    gradients = None
    if {backward}:
        flowing = [t for t in results if t.requires_grad]
        wanted = [t for t in wholes.values() if t.requires_grad]
        gradients = torch.autograd.grad(flowing, wanted, COTANGENT_GLOBAL, allow_unused=True)
    return [t.detach() for t in results], gradients, {{name: t.detach() for name, t in wholes.items()}}, None

{cotangent_text}
def body(rank, mesh, answers):
    expected, expected_gradients, left, error = expected_results()
    arguments = {{name: place(name, rank, mesh) for name in GLOBAL}}
    before = {{name: argument.to_local().detach().clone() for name, argument in arguments.items()}}
    try:
        results = tensors(call(**arguments))
    except Exception:
        if error is None:
            raise
        return []  # as the local call does
    if error is not None:
        returned = [local_part(t).tolist() for t in results]
        return [f"the local call raises {{error!r}}, the sharded one returns {{returned}}"]
    problems = []
    announce(answers, results, rank)
    for i, (got, where) in enumerate(zip(results, {asked})):
        if where is not None and tuple(got.placements) != tuple(where):
            problems.append(f"output {{i}}: placed as {{got.placements}}, expected {{where}}")
    for i, (got, wanted) in enumerate(zip(results, expected) if {strided} else ()):
        if any(n > 1 and a != b for n, a, b in zip(wanted.shape, got.stride(), wanted.stride())):
            problems.append(f"output {{i}}: has strides {{list(got.stride())}}, expected {{list(wanted.stride())}}")
    if len(results) != len(expected):
        problems.append(f"returned {{len(results)}} tensors, expected {{len(expected)}}")
    for i, (got, wanted, absolute) in enumerate(zip(results, expected, {accepted})):
        problems += check(f"output {{i}}", got.detach(), wanted, absolute, rank)
    if {backward}:
        flowing = [t for t in results if t.requires_grad]
        cotangents = [
            DTensor.from_local(local[rank].to(DEVICE), mesh, where, run_check=False, shape=w.shape, stride=w.stride())
            for local, where, w in zip(COTANGENT_LOCAL, COTANGENT_PLACEMENTS, COTANGENT_GLOBAL)
        ]
        names = [name for name, argument in arguments.items() if argument.requires_grad]
        gradients = torch.autograd.grad(flowing, [arguments[n] for n in names], cotangents, allow_unused=True)
        announce(answers, gradients, rank)
        for name, got, wanted, absolute in zip(names, gradients, expected_gradients, {accepted_gradients}):
            if (got is None) != (wanted is None):
                problems.append(f"gradient of {{name}}: got {{got}}, expected {{wanted}}")
            elif got is not None and (isinstance(got, DTensor) or wanted.numel()):
                problems += check(f"gradient of {{name}}", got, wanted, absolute, rank)
    for name, argument in arguments.items() if {writes} else ():
        if differs(left[name], GLOBAL[name].detach(), 0.0):  # the local call writes to it
            problems += check(name, argument.detach(), left[name], {accepted_writes}[name], rank)
        elif differs(argument.to_local().detach().cpu(), before[name].cpu(), 0.0):
            problems.append(f"{{name}} was changed: {{before[name].tolist()}} became {{argument.to_local().tolist()}}")
    return problems


def rank_main(rank, port, answers):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(BACKEND, init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size={world_size})
    answers.put((rank, "ready", None))  # starts the thread of the queue, for which there may be no memory later
{limit_call}    try:
        kind, said = "problems", body(rank, init_device_mesh(DEVICE, MESH), answers)
    except Exception as error:
        kind, said = "raised", [f"the sharded call raised {{type(error).__name__}}: {{error}}"]
{unlimit_call}    answers.put((rank, kind, said))
    answers.close()
    answers.join_thread()
    os._exit(0)


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, port, answers), daemon=True) for r in range({world_size})]
    for r, process in enumerate(ranks):
        os.environ["PYTHONHASHSEED"] = str(r)  # the order of sets differs from rank to rank, the same in each run
        process.start()
    failed, heard, placed, others = False, 0, {{}}, []
    while heard < {world_size}:
        try:
            rank, kind, said = answers.get(timeout=10 if failed else 60)
        except Exception:
            if not failed and not {silent}:
                print("UNDECIDED: the ranks have not answered in time, or died, and that is not the defect")
                for process in ranks:
                    process.kill()
                sys.exit(2)
            if not failed:
                print("FAILS: the ranks hang or died")
            failed = True
            break
        if kind == "ready":
            continue
        if kind == "placements":
            placed.setdefault(rank, []).append(said)
            turn = len(placed[rank]) - 1
            held = {{str(theirs[turn]) for theirs in placed.values() if len(theirs) > turn}}
            if len(held) > 1:
                failed = True
                print(f"FAILS: ranks hold their results as {{' and as '.join(sorted(held))}}")
            continue
        heard += 1
        if kind == "raised" and not {raises}:
            others += said
            continue
        for problem in said:
            failed = True
            print(f"FAILS on rank {{rank}}: {{problem}}")
    for process in ranks:
        process.kill()
    if others and not failed:
        print(f"UNDECIDED: {{others[0]}}, and that is not the defect")
        sys.exit(2)
    print("the defect is there" if failed else "the defect is gone")
    sys.exit(1 if failed else 0)
'''


MEMORY = '''\
# So many bytes may a rank map on top of what it has once all have met; allocations beyond that fail.
MEMORY_LIMIT = {limit}


def limit_memory(above):
    """Set that limit; None takes it back."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limit = hard if above is None else mapped + above
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


'''

STRIDED_IMPORT = "from torch.distributed.tensor.placement_types import _StridedShard\n"
