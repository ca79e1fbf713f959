"""Preview of saving a definition: its check, and the differences to the definition in force. Read-only.

The replicas that renewal would replace have another revision (`nodes/reconcilers/replicas.py`). The fit is
the result of `GET /api/placement/fit` for the new definition. The number of queries is constant.
"""

from dataclasses import replace
from typing import Any

from localai_cluster.kit.errors import InvalidInput
from nodes.definitions import edit, schema, store
from nodes.definitions.files import Definition
from nodes.definitions.rows import SOURCE_PREFIX
from nodes.loading import load_explanation
from nodes.models import NodeModel


def preview(
    text: str, checked: schema.CheckedText, name: str, in_force: Definition | None, former_text: str
) -> dict[str, Any]:
    """Return the errors of `text`, or the changes that saving it would make.

    `in_force` is the current definition of `name`, and `former_text` its text. An empty `name` means the name
    in the text.
    """
    definition, problems = checked.definition, list(checked.errors)
    if definition is not None and name and definition.name != name:
        problems.append(schema.TextProblem(f"`name` is {definition.name!r}, not {name!r}", "name"))
    usable = replace(definition, files=store.records_for(definition)) if definition and not problems else None
    warnings = list(checked.warnings)
    is_shadowed = in_force is not None and not in_force.source.startswith(SOURCE_PREFIX)
    if is_shadowed and in_force is not None:
        warnings.append(f"the file {in_force.source} defines this model and stays in force")
    is_changed = usable is not None and (in_force is None or in_force.revision != usable.revision)
    return {
        "valid": usable is not None,
        "errors": [
            {"line": problem.line, "column": problem.column, "path": problem.path, "message": problem.message}
            for problem in problems
        ],
        "warnings": warnings,
        "text": text,
        "form": edit.form_of(usable) if usable is not None else None,
        "revision_changes": is_changed,
        "replicas": replaced_replicas(usable)
        if usable is not None and is_changed and not is_shadowed
        else [],
        "fit": load_explanation.fit_of(load_explanation.needs_of_definition(usable))
        if usable is not None
        else None,
        "diff": store.diff(former_text, text, "in force", "new"),
    }


def replaced_replicas(definition: Definition) -> list[dict[str, Any]]:
    """Return the replicas that would be replaced after this definition is saved. One query."""
    loaded = NodeModel.objects.loaded().filter(model_name=definition.name)
    replicas = loaded.exclude(config_revision__in=["", definition.revision]).order_by(
        "node__name", "replica_index"
    )
    return [
        {"node_id": str(node_id), "node_name": name, "replica_index": index}
        for node_id, name, index in replicas.values_list("node_id", "node__name", "replica_index")
    ]


def changed_text(text: str | None, changes: dict[str, Any]) -> str:
    """Return `text` with the changes of the form; raise InvalidInput if `text` is None."""
    if text is None:
        raise InvalidInput("name: no definition to change", field="name")
    return edit.apply_changes(text, changes)
