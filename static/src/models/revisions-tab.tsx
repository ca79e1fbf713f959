// The revisions of a definition: who, when, why, and what changed; an earlier one can be restored.
import { useState, type ReactNode } from "react";
import { Fetched, Panel } from "../nodes/detail/panel";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { Ago } from "../ui/time";
import { MOST_REVISIONS, restoreRevision, REVISIONS_STEP, useDefinitionAction, useRevisions } from "./definitions";
import { Diff } from "./diff";
import type { Revision } from "./shapes";

/** `newest`: the revision that a person saw on top when they chose. */
interface Chosen {
  number: number;
  newest: number;
}

export function RevisionsTab({ name }: { name: string }): ReactNode {
  const [items, setItems] = useState(REVISIONS_STEP);
  const query = useRevisions(name, items);
  const [chosen, setChosen] = useState<Chosen | null>(null);
  const restore = useDefinitionAction(({ number, newest }: Chosen) => restoreRevision(name, number, newest), `${name} restored.`);
  const close = () => {
    restore.forget();
    setChosen(null);
  };
  return (
    <Panel title="Revisions">
      <Fetched query={query} subject="the revisions">
        {(revisions) =>
          revisions.length === 0 ? (
            <p className="muted">No revisions: a file in the models folder defines this model, and nobody has edited it here.</p>
          ) : (
            <ol className="model-revisions">
              {revisions.map((revision, index) => (
                <Line key={revision.number} revision={revision} isNewest={index === 0} onRestore={() => setChosen({ number: revision.number, newest: revisions[0]?.number ?? 0 })} />
              ))}
            </ol>
          )
        }
      </Fetched>
      {query.data !== undefined && query.data.length >= items && items < MOST_REVISIONS && (
        <div>
          <Button small busy={query.isFetching} onClick={() => setItems(Math.min(items + REVISIONS_STEP, MOST_REVISIONS))}>
            Show older
          </Button>
        </div>
      )}
      {chosen !== null && (
        <Confirm open onClose={close} title={`Restore revision ${chosen.number}`} action="Restore" busy={restore.busy} error={restore.error} onConfirm={() => restore.run(chosen, close)}>
          <p>Saves the text of this revision as a new one. Replicas that run another definition are replaced one after another.</p>
        </Confirm>
      )}
    </Panel>
  );
}

function Line({ revision: { number, actor, at, reason, origin, diff }, isNewest, onRestore }: { revision: Revision; isNewest: boolean; onRestore: () => void }): ReactNode {
  return (
    <li className="stack">
      <div className="row wrap">
        <strong>Revision {number}</strong>
        {isNewest && <span className="tag">newest</span>}
        <span className="muted">
          <Ago at={at} /> by <bdi>{actor || "the system"}</bdi>, {origin}
        </span>
        <span className="revision-reason anywhere">
          <bdi>{reason}</bdi>
        </span>
        {!isNewest && (
          <Button small aria-label={`Restore revision ${number}`} onClick={onRestore}>
            Restore…
          </Button>
        )}
      </div>
      {diff !== "" && (
        <details open={isNewest || undefined}>
          <summary>Changes of revision {number}</summary>
          <Diff text={diff} />
        </details>
      )}
    </li>
  );
}
