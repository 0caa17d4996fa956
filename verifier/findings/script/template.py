"""The text of a finding's stand-alone script, which :mod:`verifier.findings.script.render` fills by ``str.format``.

Its exit status is 1 where the defect was seen and 0 where the call ran and was right. Python's own status for an
exception that nobody catches is 1 as well, so the first thing that a script does is to make that 2.
"""

from __future__ import annotations

__all__ = ["IMPORTS", "MEMORY", "STRIDED_IMPORT", "TEMPLATE"]

TEMPLATE = '''\
"""{title}

Needs {needs}. Exit status 1: the defect was seen; 0: the call ran and was right; 2: anything else.
Seen on torch {version}; {mesh_text}.
"""

from __future__ import annotations

import os
import sys

RANKS = []


def undecided(kind, error, trace):
    """End with status 2 after what nobody expects, a Ctrl-C as well; by itself Python would end with status 1."""
    try:
        for process in RANKS:
            process.kill()
        sys.__excepthook__(kind, error, trace)
        print(f"UNDECIDED: {{kind.__name__}}: {{error}}", flush=True)
    finally:
        os._exit(2)


sys.excepthook = undecided

import contextlib
{resource_import}import signal
import socket
import time
import traceback
from multiprocessing import connection, get_context

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
{imports}
MESH = {mesh}
DEVICE = "{device}"
BACKEND = "{backend}"
VERDICT = "{verdict}"
RAISED = {raised}  # the type of the sharded call's exception, where that is the defect
LOCALLY_RAISED = {locally_raised}  # that of the local call's, where it raises
START_LIMIT = 80.0  # seconds without a word from a rank, before the sharded call
QUIET_LIMIT = 40.0  # and after its beginning
LATE_LIMIT = 3.0  # and once a rank has failed

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
WRITTEN = {written}  # arguments that the op writes to

{memory_text}{source}
def call({parameters}):
    return {call_text}


class Raised(Exception):
    """What the sharded call raised, as opposed to an exception of this script's own."""


@contextlib.contextmanager
def sharded(step):
    try:
        yield
    except Exception as error:
        raise Raised(step, type(error).__name__, str(error)) from error


def children(result):
    return list(result.values()) if isinstance(result, dict) else list(result)


def tensors(result):
    """The tensors in a result, however it nests them."""
    if isinstance(result, (tuple, list, dict)):
        return [t for item in children(result) for t in tensors(item)]
    return [result] if isinstance(result, torch.Tensor) else []


def nesting(result):
    """How a result nests its items, as text."""
    if isinstance(result, (tuple, list, dict)):
        keys = list(result) if isinstance(result, dict) else ""
        return f"{{type(result).__name__}}{{keys}}({{', '.join(map(nesting, children(result)))}})"
    return "_"


def outputs(result, arguments):
    """The tensors of a result, and the arguments that the op writes to without returning them."""
    found = tensors(result)
    return [*found, *(arguments[n] for n in WRITTEN if not any(arguments[n] is f for f in found))]


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


def comparable(tensor):
    """The same values in a dtype in which torch can compare them."""
    if tensor.dtype == torch.complex32:
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor


def differs(got, expected, absolute):
    if got.shape != expected.shape or got.dtype != expected.dtype or got.layout != expected.layout:
        return True
    got, expected = comparable(got), comparable(expected)
    if torch.equal(got, expected):  # takes no memory, of which there may be little
        return False
    same = (got == expected) | ((got != got) & (expected != expected))
    if absolute:
        same |= (got - expected).abs() <= absolute
    return not bool(same.all())


def announce(parent, results):
    """Tell what this rank's results are placed as, before a collective in which ranks that disagree may hang."""
    parent.send(("placements", [str(t.placements) if isinstance(t, DTensor) else "" for t in results]))


def shown(tensor):
    return str(tensor.tolist() if tensor.numel() else f"nothing, of shape {{list(tensor.shape)}}")


def local_part(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(what, got, expected, absolute, rank, tell):
    """Compare a DTensor with what is expected, and tell how it differs."""
    if not isinstance(got, DTensor):
        tell(f"{{what}}: is a plain tensor, expected a DTensor")
        return
    if got.shape != expected.shape:
        tell(f"{{what}}: has shape {{list(got.shape)}}, expected {{list(expected.shape)}}")
        return
    if any(getattr(placement, "dim", -1) >= expected.ndim for placement in got.placements):
        tell(f"{{what}}: placed as {{got.placements}}, expected placements of a tensor with {{expected.ndim}} dims")
        return
    if expected.layout is not torch.strided:
        return
    with sharded("the result"):
        mine = got.to_local().detach().cpu()
    part = promised(expected, got.placements, rank)
    if part is not None and differs(mine, part, absolute):
        tell(f"{{what}}: rank {{rank}} holds {{shown(mine)}}, expected {{shown(part)}}")
    with sharded("gathering"), torch.no_grad():
        whole = got.full_tensor().cpu()
    if differs(whole, expected, absolute):
        tell(f"{{what}}: gathered {{shown(whole)}}, expected {{shown(expected)}}")


class Local:
    """What the call does to the whole tensors: its results, their gradients, what it leaves of its arguments."""

    def __init__(self):
        wholes = {{n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in GLOBAL.items()}}
        self.error, self.gradients = None, None
        try:
            result = call(**wholes)
        except Exception as error:
            self.error = error
            return
        results = outputs(result, wholes)
        self.nesting, self.flowing = nesting(result), [i for i, t in enumerate(results) if t.requires_grad]
        if {backward}:
            wanted = [t for t in wholes.values() if t.requires_grad]
            flowing = [results[i] for i in self.flowing]
            self.gradients = torch.autograd.grad(flowing, wanted, COTANGENT_GLOBAL, allow_unused=True)
        self.results = [t.detach() for t in results]
        self.left = {{name: t.detach() for name, t in wholes.items()}}

    def unlike(self):
        """How the call differs from that of the finding in what it raises; empty if it does not."""
        raised = None if self.error is None else type(self.error).__name__
        if raised == LOCALLY_RAISED:
            return ""
        expected = f"expected {{LOCALLY_RAISED}}" if LOCALLY_RAISED else "expected no exception"
        did = f"raised {{raised}}: {{self.error}}" if raised else "did not raise"
        return f"the local call {{did}}, {{expected}}; is all imported that defines what it calls?"

{cotangent_text}
def compare(rank, mesh, local, arguments, parent):
    """Make the sharded call and tell the parent how it differs from the local one."""

    def tell(problem):
        parent.send(("problem", problem))

    before = {{name: argument.to_local().detach().clone() for name, argument in arguments.items()}}
    try:
        with sharded("the call"):
            result = call(**arguments)
    except Raised:
        if local.error is None:
            raise
        return  # as the local call does
    results = outputs(result, arguments)
    if local.error is not None:
        returned = [local_part(t).tolist() for t in results]
        tell(f"the local call raises {{local.error!r}}, the sharded one returns {{returned}}")
        return
    announce(parent, results)
    if nesting(result) != local.nesting:
        tell(f"returned {{nesting(result)}}, expected {{local.nesting}}")
        return
    for i, (got, where) in enumerate(zip(results, {asked})):
        if where is not None and isinstance(got, DTensor) and tuple(got.placements) != tuple(where):
            tell(f"output {{i}}: placed as {{got.placements}}, expected {{where}}")
    for i, (got, wanted) in enumerate(zip(results, local.results) if {strided} else ()):
        if any(n > 1 and a != b for n, a, b in zip(wanted.shape, got.stride(), wanted.stride())):
            tell(f"output {{i}}: has strides {{list(got.stride())}}, expected {{list(wanted.stride())}}")
    for i, (got, wanted, absolute) in enumerate(zip(results, local.results, {accepted})):
        check(f"output {{i}}", got, wanted, absolute, rank, tell)
    if {backward}:
        cotangents = [
            DTensor.from_local(part[rank].to(DEVICE), mesh, where, run_check=False, shape=w.shape, stride=w.stride())
            for part, where, w in zip(COTANGENT_LOCAL, COTANGENT_PLACEMENTS, COTANGENT_GLOBAL)
        ]
        names = [name for name, argument in arguments.items() if argument.requires_grad]
        flowing, wanted = [results[i] for i in local.flowing], [arguments[n] for n in names]
        with sharded("the backward pass"):
            gradients = torch.autograd.grad(flowing, wanted, cotangents, allow_unused=True)
        announce(parent, gradients)
        for name, got, wanted, absolute in zip(names, gradients, local.gradients, {accepted_gradients}):
            if (got is None) != (wanted is None):
                tell(f"gradient of {{name}}: got {{got}}, expected {{wanted}}")
            elif got is not None and (isinstance(got, DTensor) or wanted.numel()):
                check(f"gradient of {{name}}", got, wanted, absolute, rank, tell)
    for name, argument in arguments.items() if {writes} else ():
        if differs(local.left[name], GLOBAL[name].detach(), 0.0):  # the local call writes to it
            check(name, argument.detach(), local.left[name], {accepted_writes}[name], rank, tell)
        elif differs(argument.to_local().detach().cpu(), before[name].cpu(), 0.0):
            tell(f"{{name}} was changed: {{before[name].tolist()}} became {{argument.to_local().tolist()}}")


def rank_main(rank, port, parent):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    said = "right", None
    try:
        if DEVICE == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(BACKEND, init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size={world_size})
        mesh = init_device_mesh(DEVICE, MESH)
{limit_call}        local = Local()
        if unlike := local.unlike():
            said = "undecided", unlike
        else:
            arguments = {{name: place(name, rank, mesh) for name in GLOBAL}}
            parent.send(("ready", None))
            compare(rank, mesh, local, arguments, parent)
    except Raised as error:
        said = "raised", error.args
    except BaseException as error:
        traceback.print_exc()
        said = "undecided", f"{{type(error).__name__}}: {{error}}"
{unlimit_call}    with contextlib.suppress(OSError, EOFError):  # the parent may have seen enough
        parent.send(said)
        parent.recv()  # until it ends: to leave now would break what other ranks wait for
    os._exit(0)


class Heard:
    """What ranks have said: whether the defect was seen, and why it might be undecided."""

    def __init__(self):
        self.seen, self.doubts, self.unclear = False, [], False
        self.ready, self.ended, self.placed = set(), set(), {{}}

    def fails(self, what):
        self.seen = True
        print(f"FAILS {{what}}", flush=True)

    def take(self, rank, kind, said):
        if kind == "ready":
            self.ready.add(rank)
        elif kind == "placements":
            self.placed.setdefault(rank, []).append(said)
            turn = len(self.placed[rank]) - 1
            held = {{str(theirs[turn]) for theirs in self.placed.values() if len(theirs) > turn}}
            if len(held) > 1:
                self.fails(f"ranks hold their results as {{' and as '.join(sorted(held))}}")
        elif kind == "problem":
            self.fails(f"on rank {{rank}}: {{said}}")
        else:
            self.ended.add(rank)
        if kind == "undecided":
            self.unclear = True
            self.doubts.append(f"rank {{rank}}: {{said}}")
        if kind == "raised":
            step, name, message = said
            text = f"the sharded call raised {{name}}: {{message}}"
            if VERDICT == "CRASH" and RAISED in (name, None):
                self.fails(f"on rank {{rank}}: {{text}}")
            else:
                self.doubts.append(f"rank {{rank}}: in {{step}}, {{text}}")

    def lose(self, rank, status):
        """Take note of a rank's end, which is the defect only after its sharded call has begun."""
        self.ended.add(rank)
        if rank in self.ready and {silent}:
            self.fails(f"rank {{rank}} died with status {{status}}")
        else:
            self.unclear = True
            self.doubts.append(f"rank {{rank}} ended with status {{status}}")

    def silent(self):
        """Take note that nobody says anything any more, which is the defect only if all were in the sharded call."""
        quiet = sorted(set(range({world_size})) - self.ended)
        if self.seen:
            return  # they wait for one that failed
        if {silent} and len(self.ready) == {world_size} and not self.unclear:
            self.fails(f"ranks {{quiet}} hang")
        else:
            self.doubts.append(f"ranks {{quiet}} have not answered in time")

    def patience(self):
        if self.seen or self.doubts:
            return LATE_LIMIT
        return QUIET_LIMIT if len(self.ready) == {world_size} else START_LIMIT


def main():
    gpus = torch.cuda.device_count() if DEVICE == "cuda" else 0
    needed = {world_size} if BACKEND == "nccl" else 1
    if DEVICE == "cuda" and gpus < needed:
        print(f"UNDECIDED: {{needed}} GPUs are needed, and there are {{gpus}}")
        return 2
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context, links = get_context("spawn"), {{}}
    for rank in range({world_size}):
        mine, theirs = context.Pipe()
        os.environ["PYTHONHASHSEED"] = str(rank)  # the order of sets differs from rank to rank, the same in each run
        process = context.Process(target=rank_main, args=(rank, port, theirs), daemon=True)
        process.start()
        RANKS.append(process)
        theirs.close()  # so that the link ends with the rank
        links[mine] = rank
    heard, until = Heard(), time.monotonic() + START_LIMIT
    while len(heard.ended) < {world_size}:
        listening = [link for link, rank in links.items() if rank not in heard.ended]
        spoken = connection.wait(listening, until - time.monotonic())
        for link in spoken:
            rank = links[link]
            try:
                heard.take(rank, *link.recv())
            except (EOFError, OSError):
                RANKS[rank].join(5)
                heard.lose(rank, RANKS[rank].exitcode)
        if not spoken:
            heard.silent()
            break
        until = time.monotonic() + heard.patience()
    for process in RANKS:
        process.kill()
    if heard.seen:
        print("the defect is there")
    elif heard.doubts:
        print("\\n".join(f"UNDECIDED: {{doubt}}, and that is not the defect" for doubt in heard.doubts))
    else:
        print("the defect is gone")
    return 1 if heard.seen else 2 if heard.doubts else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like a Ctrl-C, and the ranks with it
    try:
        status = main()
        sys.stdout.flush()
    except BaseException:
        undecided(*sys.exc_info())
    sys.exit(status)
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

IMPORTS = '''\
import importlib.util

# What --import named when this was found; the rules that it registers win over torch's own.
IMPORTS = {names}
FOLDERS = {folders}


def first_import(name):
    """Import a module, run a file, or call a callable at a dotted path, as --import does."""
    if name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(f"imported_{{IMPORTS.index(name)}}", name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        parent, _, attribute = name.rpartition(".")
        if error.name != name or not parent:
            raise
        getattr(importlib.import_module(parent), attribute)()


def import_all():
    propagator = DTensor._op_dispatcher.sharding_propagator
    registries = [propagator.op_strategy_funcs, propagator.op_to_rules]
    before = [dict(registry) for registry in registries]
    for name in IMPORTS:
        try:
            first_import(name)
        except BaseException as error:
            print(f"UNDECIDED: {{name}} cannot be imported: {{type(error).__name__}}: {{error}}", flush=True)
            os._exit(2)
    for old, registry in zip(before, registries):
        for op, rule in registry.items():
            if old.get(op) is not rule:  # else DTensor would ask its own single-dim rules first
                propagator.op_single_dim_strategy_funcs.pop(op, None)


sys.path[:0] = FOLDERS
import_all()

'''
"""Runs what ``--import`` named; a script of a finding without imports has none of it, and needs torch alone."""
