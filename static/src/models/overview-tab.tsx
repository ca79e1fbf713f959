// Where a model runs, what is under way, why it is there, where one more replica fits, and its requests over time.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { useRefreshed } from "../live/refreshed";
import { ACTION, IN_FLIGHT, LOGS, placeId, STATE } from "../nodes/detail/unload";
import { Panel } from "../nodes/detail/panel";
import { Charts } from "../overview/charts";
import { AfterPaint } from "../ui/after-paint";
import type { Column } from "../ui/rows";
import { Table } from "../ui/table";
import { Ago } from "../ui/time";
import { Why } from "./explanation";
import { useFit } from "./fits";
import { WhereItFits } from "./memory";
import { rateText } from "./columns";
import { loadRefusal, type ModelRow, type Place } from "./rows";
import { Failure, Work } from "./work";

/** A model may run on hundreds of nodes. */
const REPLICAS_FIRST = 20;

export function OverviewTab({ row }: { row: ModelRow }): ReactNode {
  return (
    <>
      {row.definition?.problem !== undefined && row.definition.problem !== "" && (
        <p className="problem" role="note">
          <bdi>{row.definition.problem}</bdi>
        </p>
      )}
      {(row.active.length > 0 || row.failed.length > 0) && (
        <Panel title="Operations">
          {row.active.map((operation) => (
            <Work key={operation.jobID} operation={operation} />
          ))}
          {row.failed.map((operation) => (
            <Failure key={operation.jobID} operation={operation} />
          ))}
        </Panel>
      )}
      <Panel title="Replicas" aside={row.rate !== null && <span className="muted">Requests in the last minute: {rateText(row.rate)}</span>}>
        {row.places.length === 0 ? (
          <NotRunning row={row} />
        ) : (
          <Table name={`Replicas of ${row.name}`} columns={COLUMNS} rows={row.places} rowId={placeId} rowName={({ node }) => node.name} first={REPLICAS_FIRST} />
        )}
        <Why row={row} />
        {row.definition !== undefined && <WhereItFits model={row.name} />}
      </Panel>
      <AfterPaint>
        <Charts model={row.name} />
      </AfterPaint>
    </>
  );
}

const FIT_EVERY_MS = 30_000;

function NotRunning({ row }: { row: ModelRow }): ReactNode {
  const refusal = loadRefusal(row);
  return (
    <>
      <p className="muted">Not running. {refusal === "" ? "The first request loads the model." : `Requests cannot load the model: ${refusal}.`}</p>
      {row.definition !== undefined && row.definition.state !== "unusable" && <MemoryNow model={row.name} />}
    </>
  );
}

function MemoryNow({ model }: { model: string }): ReactNode {
  const { data } = useRefreshed(useFit(model, { enabled: true, staleTime: 0 }), FIT_EVERY_MS);
  if (data === undefined || data.says === "") return null;
  return (
    <p className="muted anywhere">
      Memory now: <bdi>{data.says}</bdi>.
    </p>
  );
}

const COLUMNS: readonly Column<Place>[] = [
  {
    key: "node",
    title: "Node",
    value: ({ node }) => node.name,
    cell: ({ node }) => (
      <Link to={`/app/nodes/${node.id}`}>
        <bdi>{node.name}</bdi>
      </Link>
    ),
  },
  { key: "replica", title: "Replica", numeric: true, value: ({ model }) => model.replica_index, cell: ({ model }) => model.replica_index },
  STATE,
  IN_FLIGHT,
  { key: "since", title: "Since", value: ({ model }) => model.created_at, cell: ({ model }) => <Ago at={model.created_at} /> },
  LOGS,
  ACTION,
];
