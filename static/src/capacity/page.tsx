// The capacity map: how much memory the fleet has, used, reserved and free, by node and GPU, and where one more replica of
// a model would fit. Figures come with the feed; what fits where is the server's word.
import { useDeferredValue, useMemo, type ReactNode } from "react";
import { Link } from "react-router";
import { isLoaded, useThrottledNodes } from "../backends/throttled-nodes";
import { bytes, count } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import type { LiveNode } from "../live/messages";
import { useDefinitions } from "../models/data";
import { Details } from "../models/decision";
import { AfterPaint } from "../ui/after-paint";
import { Meter, MeterLegend } from "../ui/bars";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { Select } from "../ui/select";
import { TextInput } from "../ui/text-field";
import { PageHead } from "../ui/title";
import { useFit, verdicts, type Fit } from "./fit";
import { addressOf, grouped, groupKeys, parseView, ORDERS, RESOURCES, summed, type MapView, type Place, type Resource } from "./fleet";
import { FleetMap } from "./map";
import { CapacityTabs } from "./tabs";
import "../nodes/detail/detail.css";
import "../nodes/shared/shared.css";
import "../models/models.css";
import "./capacity.css";

const NAMES: Readonly<Record<Resource, string>> = { vram: "VRAM", ram: "RAM", disk: "Models disk" };

export function CapacityPage(): ReactNode {
  const nodes = useThrottledNodes();
  return (
    <div className="cap">
      <PageHead title="Capacity" note="Free memory by node, and what fits." />
      <CapacityTabs part="" />
      {!isLoaded(nodes) && <Loading subject="nodes" />}
      {isLoaded(nodes) && nodes.size === 0 && (
        <Empty title="No workers registered yet">
          <Link className="button" to="/app/nodes">
            Add a node
          </Link>
        </Empty>
      )}
      {nodes.size > 0 && <Fleet nodes={nodes} />}
    </div>
  );
}

function Fleet({ nodes }: { nodes: ReadonlyMap<string, LiveNode> }): ReactNode {
  const [view, setView] = useInAddress(parseView, addressOf);
  const settled = useDeferredValue(view);
  const present = useDeferredValue(nodes);
  const groups = useMemo(() => grouped(present.values(), settled), [present, settled]);
  const fit = useFit(view.model, nodes);
  const verdictsByNode = useMemo(() => verdicts(view.model === "" ? undefined : fit.data), [view.model, fit.data]);
  const places = groups.flatMap((group) => group.places);
  return (
    <>
      <ViewControls nodes={present} view={view} onView={setView} />
      <Sums places={places} resource={settled.resource} total={present.size} />
      {view.model !== "" && fit.isPending && <Loading subject={`where ${view.model} fits`} />}
      {view.model !== "" && fit.error !== null && <Problem error={fit.error} onRetry={() => void fit.refetch()} />}
      {view.model !== "" && fit.data !== undefined && <FitSummary fit={fit.data} />}
      {places.length === 0 ? <Empty title={`No node reports ${NAMES[settled.resource]}.`} /> : <AfterPaint><FleetMap groups={groups} verdicts={verdictsByNode} /></AfterPaint>}
    </>
  );
}

interface ViewControlsProps {
  nodes: ReadonlyMap<string, LiveNode>;
  view: MapView;
  onView: (view: MapView) => void;
}

function ViewControls({ nodes, view, onView }: ViewControlsProps): ReactNode {
  const { data = [] } = useDefinitions();
  const keys = useMemo(() => groupKeys(nodes.values()), [nodes]);
  const groupings = ["", "gpu", "state", ...keys.map((key) => `label:${key}`)];
  return (
    <div className="row wrap cap-looks">
      <Select label="Show" value={view.resource} options={RESOURCES.map((option) => [option, NAMES[option]])} onChange={(resource) => onView({ ...view, resource: resource as Resource })} />
      <Select
        label="Group by"
        value={view.group}
        options={(groupings.includes(view.group) ? groupings : [...groupings, view.group]).map((grouping) => [grouping, groupName(grouping)])}
        onChange={(group) => onView({ ...view, group })}
      />
      <Select label="Order" value={view.order} options={ORDERS.map((order) => [order, order === "name" ? "Name" : "Most free first"])} onChange={(order) => onView({ ...view, order: order as MapView["order"] })} />
      <label className="field cap-model">
        <span>Where does it fit?</span>
        <TextInput type="search" placeholder="A model" suggestions={data.map(({ id }) => id)} value={view.model} onChange={(model) => onView({ ...view, model })} />
      </label>
    </div>
  );
}

function groupName(group: string): string {
  if (group === "gpu") return "GPU";
  if (group === "state") return "State";
  return group === "" ? "Nothing" : `Label ${group.slice("label:".length)}`;
}

function Sums({ places, resource, total }: { places: readonly Place[]; resource: Resource; total: number }): ReactNode {
  const sums = useMemo(() => summed(places), [places]);
  const closed = places.length - sums.nodes;
  const without = total - places.length;
  return (
    <div className="cap-sums">
      <dl className="cap-figures">
        <Sum name={`${NAMES[resource]} free`} value={bytes(sums.free)} />
        <Sum name="Used" value={bytes(sums.used)} />
        <Sum name="Reserved" value={bytes(sums.reserved)} />
        <Sum name="Total" value={bytes(sums.total)} />
        <Sum name="Largest free block" value={sums.largest === 0 ? "none" : `${bytes(sums.largest)} on ${sums.largestAt}`} />
      </dl>
      <Meter name={`${NAMES[resource]} of all nodes in service`} used={sums.used} reserved={sums.reserved} total={sums.total} />
      <div className="row wrap spread">
        <span className="muted">
          {count(sums.nodes, "node")} in service
          {closed > 0 && `; ${closed} not in service, not counted`}
          {without > 0 && `; ${without} without ${resource === "vram" ? "GPU" : NAMES[resource]}`}
        </span>
        <MeterLegend />
      </div>
    </div>
  );
}

function Sum({ name, value }: { name: string; value: string }): ReactNode {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        <bdi>{value}</bdi>
      </dd>
    </div>
  );
}

/** The fit in a sentence, with the best nodes and the nearest misses below it. */
function FitSummary({ fit }: { fit: Fit }): ReactNode {
  const { placement, model } = fit;
  const [nearest] = placement.misses;
  return (
    <section className="nd-panel" aria-label={`Where ${model} fits`}>
      <p className="anywhere" role="status">
        <strong>
          {placement.outcome === "placed" ? (
            <>
              One more replica of <bdi>{model}</bdi> would go to <bdi>{placement.node}</bdi>:
            </>
          ) : (
            <>
              No node can take one more replica of <bdi>{model}</bdi>:
            </>
          )}
        </strong>{" "}
        <bdi>{placement.reason}</bdi>
        {placement.outcome !== "placed" && nearest !== undefined && (
          <>
            {" "}
            Nearest miss: <Link to={`/app/nodes/${nearest.node_id}`}><bdi>{nearest.node}</bdi></Link>, <bdi>{nearest.reason}</bdi>.
          </>
        )}
      </p>
      <details>
        <summary>Placement details</summary>
        <Details decision={placement} name={model} />
      </details>
    </section>
  );
}
