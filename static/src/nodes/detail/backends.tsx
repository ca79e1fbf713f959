// The backends of the node from its worker's last list, with its age and why there is no newer one.
import type { UseQueryResult } from "@tanstack/react-query";
import { useMemo, useState, type ReactNode } from "react";
import { BackendLink, Version } from "../../backends/cells";
import { bytes } from "../../lib/format";
import type { LiveNode, Operation } from "../../live/messages";
import { Button } from "../../ui/button";
import { Empty } from "../../ui/empty";
import type { Column } from "../../ui/rows";
import { Table } from "../../ui/table";
import { Ago } from "../../ui/time";
import { InstallDialog } from "../shared/install-dialog";
import { refusal } from "../shared/verbs";
import { BackendActions } from "./backend-actions";
import { useBackends, type NodeBackend, type NodeDetail } from "./data";
import { Fetched, Panel } from "./panel";

interface BackendsProps {
  node: LiveNode;
  detail: UseQueryResult<NodeDetail>;
  /** Those of this node that are under way or have failed. */
  operations: readonly Operation[];
}

export function Backends({ node, detail, operations }: BackendsProps): ReactNode {
  const [adding, setAdding] = useState(false);
  const listed = useBackends(node.id);
  const problem = detail.data?.inventory.error ?? "";
  const add = (
    <Button small refusal={refusal("install", node)} onClick={() => setAdding(true)}>
      Add backend
    </Button>
  );
  return (
    <Panel title="Installed backends" aside={add}>
      <AsOf node={node} problem={problem} />
      <Fetched query={listed} subject="the backends">
        {(backends) =>
          backends.length > 0 ? <List node={node} backends={backends} operations={operations} /> : <None node={node} add={add} />
        }
      </Fetched>
      {adding && <InstallDialog nodeIds={[node.id]} onClose={() => setAdding(false)} />}
    </Panel>
  );
}

function AsOf({ node, problem }: { node: LiveNode; problem: string }): ReactNode {
  return (
    <>
      <p className="muted">
        {node.inventory_at === null ? "Not reported yet" : <>Reported by the worker <Ago at={node.inventory_at} /></>}
      </p>
      {problem !== "" && (
        <p className="nd-warning" role="status">
          Refresh failed: <bdi>{problem}</bdi>; retrying automatically.
        </p>
      )}
    </>
  );
}

function None({ node, add }: { node: LiveNode; add: ReactNode }): ReactNode {
  if (node.inventory_at === null) return null;
  return <Empty title="No backends installed">{add}</Empty>;
}

interface ListProps {
  node: LiveNode;
  backends: readonly NodeBackend[];
  operations: readonly Operation[];
}

function List({ node, backends, operations }: ListProps): ReactNode {
  const columns = useMemo(
    (): readonly Column<NodeBackend>[] => [
      ...COLUMNS,
      { key: "actions", title: "Actions", cell: (backend) => !backend.is_system && <BackendActions node={node} name={backend.name} operations={operations} /> },
    ],
    [node, operations],
  );
  return (
    <div className="table-scroll">
      <Table name="Installed backends" columns={columns} rows={backends} rowId={nameOf} rowName={nameOf} />
    </div>
  );
}

const nameOf = ({ name }: NodeBackend) => name;

const COLUMNS: readonly Column<NodeBackend>[] = [
  { key: "name", title: "Name", value: nameOf, cell: ({ name }) => <BackendLink name={name} /> },
  { key: "version", title: "Version", value: ({ version }) => version ?? null, cell: ({ version = "", digest = "" }) => <Version version={version} digest={digest} /> },
  {
    key: "type",
    title: "Type",
    value: ({ is_system }) => (is_system ? "system" : "gallery"),
    cell: (backend) => (
      <>
        <span className="tag">{backend.is_system ? "system" : "gallery"}</span> {backend.is_meta && <span className="tag">meta</span>}
      </>
    ),
  },
  { key: "size", title: "Size", numeric: true, largestFirst: true, value: ({ size }) => size ?? null, cell: ({ size }) => (size === undefined ? "–" : bytes(size)) },
  {
    key: "installed",
    title: "Installed",
    value: ({ installed_at }) => installed_at ?? null,
    cell: ({ installed_at }) => (installed_at === undefined ? <span className="muted">unknown</span> : <Ago at={installed_at} />),
  },
];
