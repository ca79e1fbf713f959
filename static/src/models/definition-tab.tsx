// A definition as it is in force, and the way to edit it.
import type { ReactNode } from "react";
import { Fetched, Panel } from "../nodes/detail/panel";
import { Button } from "../ui/button";
import { Ago } from "../ui/time";
import { CodeArea } from "./code-area";
import { useDefinition } from "./definitions";
import { Editor, Shadow } from "./editor";
import type { DefinitionDetail } from "./shapes";

const ORIGINS: Readonly<Record<DefinitionDetail["origin"], string>> = { file: "A file in the models folder", gallery: "From a gallery", import: "Imported", api: "Created through the API", editor: "Created here" };

interface TabProps {
  name: string;
  /** The definition that was taken up for editing; null: it is only read. */
  edited: DefinitionDetail | null;
  onEdit: (edited: DefinitionDetail | null) => void;
}

export function DefinitionTab({ name, edited, onEdit }: TabProps): ReactNode {
  const query = useDefinition(name);
  return (
    <Panel title={edited === null ? "Definition" : "Edit definition"} aside={edited === null && query.data !== undefined && <Button onClick={() => onEdit(query.data)}>Edit</Button>}>
      <Fetched query={query} subject="the definition">
        {(detail) => (edited === null ? <Read detail={detail} /> : <Editor detail={edited} newest={detail} onRebase={onEdit} onClose={() => onEdit(null)} />)}
      </Fetched>
    </Panel>
  );
}

function Read({ detail }: { detail: DefinitionDetail }): ReactNode {
  const { name, text, origin, revision, updated_at: at, actor, warnings, error, shadowed, file } = detail;
  return (
    <>
      <p className="muted anywhere">
        {ORIGINS[origin]}
        {revision > 0 && <>, revision {revision}</>}
        , changed <Ago at={at} />
        {actor !== "" && (
          <>
            {" "}
            by <bdi>{actor}</bdi>
          </>
        )}
        .
      </p>
      <Shadow shadowed={shadowed} file={file} />
      {error !== "" && (
        <p className="problem" role="note">
          <bdi>{error}</bdi>
        </p>
      )}
      {warnings.map((warning) => (
        <p key={warning} className="risk">
          <bdi>{warning}</bdi>
        </p>
      ))}
      <CodeArea label={`Definition of ${name}`} text={text} />
    </>
  );
}
