"""Keys of names count characters of other scripts as what they look like (Unicode TS 39).

Only names outside ASCII get another key. Where two of them, or one and a name in ASCII, now look alike, both
stay: the later one keeps apart by its id, as such names did when keys were introduced.
"""

from typing import Any

from django.db import migrations

from localai_cluster.kit import names


def look_again(apps: Any, schema_editor: Any) -> None:
    """Computes the keys again."""
    nodes = apps.get_model("nodes", "BackendNode").objects.using(schema_editor.connection.alias)
    foreign = [node for node in nodes.order_by("created_at", "id") if not node.name.isascii()]
    taken = set(nodes.exclude(pk__in=[node.pk for node in foreign]).values_list("name_key", flat=True))
    changed = []
    for node in foreign:
        key = names.key(node.name)
        wanted = key if key not in taken and len(key) <= names.MAX_NAME_LENGTH else f"{key[:200]}#{node.id}"
        taken.add(wanted)
        if wanted != node.name_key:
            node.name_key = wanted
            changed.append(node)
    # First out of each other's way: a key may be wanted that another row still holds.
    nodes.bulk_update([_aside(node) for node in changed], ["name_key"])
    nodes.bulk_update(changed, ["name_key"])


def _aside(node: Any) -> Any:
    return type(node)(pk=node.pk, name_key=f"#{node.pk}")


class Migration(migrations.Migration):
    dependencies = [("nodes", "0009_join_tokens")]

    operations = [migrations.RunPython(look_again, migrations.RunPython.noop)]
