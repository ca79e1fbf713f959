"""Agent nodes: the user and API key that the registry creates for them (R1.26, R1.31, R1.38).

Both live as long as the node: every approved registration replaces them; deregistration and a revoked secret
remove them. The token is returned once and stored nowhere.
"""

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group

from localai_cluster.accounts import principals
from nodes.models import BackendNode
from nodes.registry.change import Change

_GROUP = "collections"
_LONGEST_USERNAME = 150


def provision(change: Change) -> str:
    """Create a new user and key for the agent in place of any earlier ones; return the key's plaintext."""
    revoke(change)
    users = get_user_model()
    user = users.objects.create_user(username=_username(change.node))
    user.groups.add(Group.objects.get_or_create(name=_GROUP)[0])
    key, plain = principals.create_agent_key(user, change.node.name)
    change.set(auth_user_id=user.pk, api_key_id=key.pk)
    return plain


def revoke(change: Change) -> None:
    """Remove the agent's user, and with it the key; do nothing if it has none."""
    user_id = change.node.auth_user_id
    if user_id is None:
        return
    change.set(auth_user_id=None, api_key_id=None)
    get_user_model().objects.filter(pk=user_id).delete()


def _username(node: BackendNode) -> str:
    """Return `agent-worker:<node>`, with the node's id if that is too long or the name is taken."""
    users = get_user_model()
    name = users.normalize_username(f"agent-worker:{node.name}")
    is_taken = users.objects.filter(username=name).exists()
    return f"agent-worker:{node.id}" if is_taken or len(name) > _LONGEST_USERNAME else name
