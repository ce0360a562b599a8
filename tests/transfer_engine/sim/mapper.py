"""A simulated client that maps a node's memory, and touches it whenever it likes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.transfer_engine.sim.actors import SLOT_BYTES, SimNode, Slot, demand

if TYPE_CHECKING:
    from tests.transfer_engine.sim.world import World


class Mapper:
    """A client that maps a node's memory, and cannot be refused anything while it lives."""

    def __init__(self, world: World, node: SimNode) -> None:
        self.world, self.node = world, node
        self.generation = node.generation
        self.session_id = world.next_number()
        self.name = f"mapper-{self.session_id}"
        self.slots: dict[int, Slot] = {}
        self.lost = False
        node.access.open_session(self.session_id, pid=self.session_id, may_write=True)

    @property
    def over(self) -> bool:
        return not self.node.up or self.node.generation != self.generation

    def reserve(self) -> None:
        if not self.lost:
            slot = self.node.reserve(self.session_id, 300, mapped_by=self.name)
            if slot is not None:
                (lease,) = slot.leases
                self.slots[lease] = slot

    def touch(self) -> None:
        for slot in self.slots.values():
            demand(slot.mapped_by == self.name, f"{self.node.name} slot {slot.index}: reused while it is mapped")
            at = slot.offset + self.world.chance.randrange(SLOT_BYTES)
            self.node.segment.view[at] = self.world.chance.randrange(256)

    def release(self) -> None:
        if self.slots:
            lease, _ = self.slots.popitem()
            self.node.freed(self.node.access.release(lease))  # type: ignore[arg-type]

    def lose(self) -> None:
        """Its connection is gone, the process lives."""
        self.lost = True
        self.node.freed(self.node.access.close_session(self.session_id))

    def exit(self) -> None:
        self.slots.clear()
        self.node.freed(self.node.access.session_exited(self.session_id))
