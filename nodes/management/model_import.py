"""The verb `add` of `manage.py models`: show what a text means, import it, and follow the import."""

from localai_cluster.accounts.command_line import AddVerb, Options, as_json, current_actor, printable, table
from localai_cluster.kit import clock, errors
from localai_cluster.messaging.messages import human_bytes
from localai_cluster.web.shapes import Row
from nodes.downloads.imports import request_import
from nodes.sources import inspection
from operations.management import following

_VARIANTS = ("VARIANT", "SIZE", "CONTEXT", "FITS", "")
_CANDIDATES = ("ADD", "KIND", "DESCRIPTION")


def add_verb(add: AddVerb) -> None:
    """Register the verb."""
    added = add("add", add_model, "Import a model from a name, an address, a command line or a definition.")
    added.add_argument("text", metavar="TEXT")
    added.add_argument("--variant", default="", help="its id; without it the best one that fits")
    added.add_argument("--name", default="", help="name of the model")
    added.add_argument("--show", action="store_true", help="only show what the text means")
    added.add_argument("--load", action="store_true", help="load the model afterwards")
    added.add_argument("--detach", action="store_true", help="do not wait for the end")


def add_model(options: Options) -> str:
    """Show what the text means, or request its import and follow that to its end."""
    if options["show"]:
        found = inspection.inspect(options["text"], clock.now())
        return as_json(found) if options["json"] else _shown(found)
    plan = inspection.plan_import(
        options["text"], variant=options["variant"], name=options["name"], now=clock.now()
    )
    if inspection.is_defined(plan.name):
        raise errors.Conflict(f"a model {plan.name} is defined: choose another name with --name, or edit it")
    admission = request_import(plan, actor=str(current_actor()), now=clock.now(), load=options["load"])
    job = admission.operation.id
    if options["detach"]:
        said = f"{plan.name}: operation {job}; `manage.py operations show {job} --follow` shows it"
        return as_json({"jobID": str(job), "model": plan.name}) if options["json"] else said
    return following.to_its_end(job, options["out"], as_json=options["json"])


def _shown(found: Row) -> str:
    lines = [printable(f"{found['title']} ({found['kind']})")]
    lines += [printable(f"{name}: {found[name]}") for name in ("licence", "commit", "problem") if found[name]]
    if found["variants"]:
        lines.append(table(_VARIANTS, [_variant(variant) for variant in found["variants"]]))
    if found["candidates"]:
        rows = [(each["text"], each["kind"], each["description"][:60]) for each in found["candidates"]]
        lines.append(table(_CANDIDATES, rows))
    return "\n".join(lines)


def _variant(variant: Row) -> tuple[str, ...]:
    fits = {True: "yes", False: "no", None: "unknown"}[variant["fit"]["fits"]]
    size = human_bytes(variant["size"]) if variant["size"] else "unknown"
    context = str(variant["context_size"] or "")
    return variant["id"], size, context, fits, "recommended" if variant["recommended"] else ""
