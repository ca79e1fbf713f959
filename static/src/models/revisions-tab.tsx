// The revisions of a definition: who, when, why, and what changed; an earlier one can be restored.
import { useState, type ReactNode } from "react";
import { Fetched, Panel } from "../nodes/detail/panel";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { Ago } from "../ui/time";
import { restoreRevision, useDefinitionAction, useRevisions } from "./definitions";
import { Diff } from "./diff";
import type { Revision } from "./shapes";

export function RevisionsTab({ name }: { name: string }): ReactNode {
  const query = useRevisions(name);
  const [chosen, setChosen] = useState<number | null>(null);
  const restore = useDefinitionAction((number: number) => restoreRevision(name, number, query.data?.[0]?.number ?? 0), `${name} restored.`);
  const close = () => {
    restore.forget();
    setChosen(null);
  };
  return (
    <Panel title="Revisions">
      <Fetched query={query} subject="the revisions">
        {(revisions) =>
          revisions.length === 0 ? (
            <p className="muted">None: the definition is a file of the models folder that was never edited here.</p>
          ) : (
            <ol className="model-revisions">
              {revisions.map((revision, index) => (
                <Line key={revision.number} revision={revision} isNewest={index === 0} onRestore={() => setChosen(revision.number)} />
              ))}
            </ol>
          )
        }
      </Fetched>
      {chosen !== null && (
        <Confirm open onClose={close} title={`Restore revision ${chosen}`} action="Restore" busy={restore.busy} error={restore.error} onConfirm={() => restore.run(chosen, close)}>
          <p>A new revision gets its text. Replicas of another definition are replaced one after the other.</p>
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
        <span className="grow anywhere">
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
