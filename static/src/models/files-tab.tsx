// The files that a definition names, and where they lie.
import type { ReactNode } from "react";
import { bytes } from "../lib/format";
import { Fetched, Panel } from "../nodes/detail/panel";
import type { Column } from "../ui/rows";
import { Table } from "../ui/table";
import { useDefinition } from "./definitions";
import type { ModelRow } from "./rows";
import type { DefinitionDetail } from "./shapes";

type File = DefinitionDetail["files"][number];

export function FilesTab({ row }: { row: ModelRow }): ReactNode {
  const query = useDefinition(row.name);
  const nodes = [...new Set(row.places.map(({ node }) => node.name))];
  return (
    <Panel title="Files">
      <Fetched query={query} subject="the files">
        {({ files, size, file }) => (
          <>
            {file !== "" && (
              <p className="anywhere">
                Defined by <code>{file}</code> in the models folder.
              </p>
            )}
            {files.length === 0 && <p className="muted">The definition names no files in the models folder. The backend downloads what it needs.</p>}
            {files.length > 0 && <Table name={`Files of ${row.name}`} columns={COLUMNS} rows={files} rowId={({ path }) => path} rowName={({ path }) => path} first={100} />}
            {size > 0 && <p>Total: {bytes(size)}.</p>}
            <p className="muted anywhere">{nodes.length === 0 ? "A node receives the files with its first replica." : `Also on nodes with a replica: ${nodes.slice(0, 20).join(", ")}${nodes.length > 20 ? ` and ${nodes.length - 20} more` : ""}.`}</p>
          </>
        )}
      </Fetched>
    </Panel>
  );
}

/** A file that is recorded, and neither here nor known to be at its source: the models folder has a problem. */
function Presence({ size, present, source }: File): ReactNode {
  if (present) return "yes";
  if (source !== "") return <bdi className="anywhere">no: nodes download it from {source}</bdi>;
  return size > 0 ? <span className="pill warn">unknown: the models folder cannot be read</span> : <span className="pill bad">missing</span>;
}

const COLUMNS: readonly Column<File>[] = [
  { key: "path", title: "Path", value: ({ path }) => path, cell: ({ path }) => <bdi className="mono">{path}</bdi> },
  { key: "size", title: "Size", numeric: true, largestFirst: true, value: ({ size }) => size, cell: ({ size, present }) => (present || size > 0 ? bytes(size) : "unknown") },
  { key: "present", title: "On the control plane", value: ({ present, source }) => (present ? 0 : source !== "" ? 1 : 2), cell: (file) => <Presence {...file} /> },
];
