"""The function of DTensors that runs an op or a function on local tensors, under the derived rules."""

from __future__ import annotations

from verifier.deriving.writing.subject import Subject, given_as

__all__ = ["run_on_locals"]


def run_on_locals(subject: Subject) -> list[str]:
    """Return the lines of the function that runs an op on local tensors."""
    given = subject.given()
    local = ", ".join(given_as(a.name, _local(subject, a.name), a.kwarg_only) for a in subject.schema)
    return f'''

def {subject.name}_sharded({subject.parameters()}):
    """Run {subject.path} on the local tensors of DTensors, under the rule for their placements on each mesh dim.

    Raises NotImplementedError where there is no rule, or shards are uneven: redistribute the tensors first.
    """
    tensors = {subject.given_tensors()}
    if not any(isinstance(one, DTensor) for one in tensors):
        return {subject.path}({given})
    if not all(isinstance(one, DTensor) for one in tensors):
        raise NotImplementedError("{subject.name}_sharded: some tensors are DTensors and others are not")
    mesh = tensors[0].device_mesh
    for one in tensors:
        for dim in range(one.ndim):
            parts = math.prod(mesh.size(n) for n, placement in enumerate(one.placements) if placement.is_shard(dim))
            if one.shape[dim] % parts:
                raise NotImplementedError("{subject.name}_sharded: local_map cannot place uneven shards")
    rules = {subject.name}_rules({given})
    chosen = []
    for n in range(mesh.ndim):
        placed = [one.placements[n] for one in tensors]
        rule = next((rule for rule in rules if rule[1] == placed), None)
        if rule is None:
            raise NotImplementedError(f"{subject.name}_sharded: there is no rule for {{placed}} on mesh dim {{n}}")
        chosen.append(rule)
    outputs, inputs, gradients = (tuple(zip(*part, strict=True)) for part in zip(*chosen, strict=True))

    def on_locals(*local_tensors):
        rest = iter(local_tensors)
        return {subject.path}({local})

    return local_map(on_locals, outputs, inputs, gradients, mesh)(*tensors)'''.split("\n")


def _local(subject: Subject, name: str) -> str:
    """Return what the op gets for a parameter in the local call."""
    if name in subject.lists:
        return f"[next(rest) for _ in {name}]"
    if name not in subject.tensors:
        return name
    there = subject.is_there(name)
    return f"next(rest) if {there} else {name}" if there else "next(rest)"
