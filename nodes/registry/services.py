"""The verbs of the registry: every significant write to a node.

Each verb is one short transaction that takes `now`: it locks the node's row, checks the table in `states.py`,
writes facts and timeline together, and sends a NOTIFY exactly at commit. A verb raises NotFound for an
unknown node, and Conflict if the table refuses the event. Heartbeats are written in batches by
`heartbeats.py`.
"""

from nodes.registry.change import locked
from nodes.registry.claims import (
    NOT_ACCEPTABLE,
    accept_conflict,
    note_other_process,
    refuse_conflict,
    request_rotation,
    revoke,
    rotate,
)
from nodes.registry.drains import LONGEST_DEADLINE, drain, drain_itself, finish_drains, resume, resume_itself
from nodes.registry.enrolment import enrol
from nodes.registry.fleet import lock_in_order
from nodes.registry.labels import (
    auto_labels,
    check_labels,
    edit_labels,
    merge_labels,
    remove_label,
    set_labels,
)
from nodes.registry.lifecycle import (
    Approved,
    Outcome,
    approve,
    approve_many,
    deactivate,
    deregister,
    fell_silent,
    lose_contact,
    mark_healthy,
    mark_unhealthy,
    recovered,
    reject,
)
from nodes.registry.overrides import reset_replica_cap, reset_vram_budget, set_replica_cap, set_vram_budget
from nodes.registry.registration import (
    Registered,
    RegistrationOutcome,
    register,
    register_all,
    register_one,
)
from nodes.registry.registration_claim import Claim, Registration, Running, claim
from nodes.registry.states import facts_of

__all__ = [
    "LONGEST_DEADLINE",
    "NOT_ACCEPTABLE",
    "Approved",
    "Claim",
    "Outcome",
    "Registered",
    "Registration",
    "RegistrationOutcome",
    "Running",
    "accept_conflict",
    "approve",
    "approve_many",
    "auto_labels",
    "check_labels",
    "claim",
    "deactivate",
    "deregister",
    "drain",
    "drain_itself",
    "edit_labels",
    "enrol",
    "facts_of",
    "fell_silent",
    "finish_drains",
    "lock_in_order",
    "locked",
    "lose_contact",
    "mark_healthy",
    "mark_unhealthy",
    "merge_labels",
    "note_other_process",
    "recovered",
    "refuse_conflict",
    "register",
    "register_all",
    "register_one",
    "reject",
    "remove_label",
    "request_rotation",
    "reset_replica_cap",
    "reset_vram_budget",
    "resume",
    "resume_itself",
    "revoke",
    "rotate",
    "set_labels",
    "set_replica_cap",
    "set_vram_budget",
]
