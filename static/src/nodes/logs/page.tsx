// The output of a node's engines, live: which model or replica, what of it, paused or followed. The worker keeps the
// last lines of each engine, also of those that have ended, so that the reason can be read here.
import { useQuery, type UseQueryResult } from "@tanstack/react-query";
import { useDeferredValue, useEffect, useId, useMemo, useRef, useState, useSyncExternalStore, type ReactNode } from "react";
import { call, client } from "../../api/client";
import { download } from "../../lib/download";
import { count } from "../../lib/format";
import { useInAddress } from "../../lib/in-address";
import { useChange, useLive } from "../../live/hooks";
import type { LiveModel, LiveNode } from "../../live/messages";
import { announce } from "../../ui/announce";
import { Button } from "../../ui/button";
import { Empty, Loading } from "../../ui/empty";
import { Problem } from "../../ui/problem";
import { Select } from "../../ui/select";
import { useShortcut } from "../../ui/shortcuts";
import { Checkbox } from "../../ui/text-field";
import { addressOf, asText, chosen, fileName, modelOf, placeIn, type Line, type Place, type Stream } from "./lines";
import { Tail, type TailState } from "./tail";
import { LogView } from "./view";
import "./logs.css";

const STREAMS: readonly { stream: Stream | ""; label: string }[] = [
  { stream: "", label: "All" },
  { stream: "stdout", label: "stdout" },
  { stream: "stderr", label: "stderr" },
];

export function Logs({ node: { id, name, models: running } }: { node: LiveNode }): ReactNode {
  const [place, setPlace] = useInAddress(placeIn, addressOf);
  const storedLogs = useKept(id);
  const models = useMemo(() => replicaNames(running, storedLogs.data ?? [], place.of), [running, storedLogs.data, place.of]);
  const [only] = models;
  // Of one there is nothing to choose.
  const of = place.of === "" && models.length === 1 && only !== undefined ? only : place.of;
  return (
    <div className="logs">
      <h2>Logs{of !== "" && <> of <bdi>{of}</bdi></>}</h2>
      <ReplicaChoice models={models} running={running} of={of} onChange={(next) => setPlace((previous) => ({ ...previous, of: next }))} />
      {of === "" ? (
        <NothingChosen storedLogs={storedLogs} />
      ) : (
        <OneLog key={`${id} ${of}`} id={id} node={name} place={{ ...place, of }} onPlace={setPlace} ended={!runs(running, of)} />
      )}
    </div>
  );
}

/** The models whose output the worker has, those of ended engines too. */
function useKept(id: string): UseQueryResult<string[]> {
  return useQuery({
    queryKey: ["nodes", id, "logs"],
    queryFn: ({ signal }) => call(client.GET("/api/nodes/{node_id}/backend-logs", { params: { path: { node_id: id } }, signal })),
    retry: false,
  });
}

function replicaNames(running: readonly LiveModel[], storedLogs: readonly string[], of: string): string[] {
  return [...new Set([...running.map((model) => model.model_name), ...storedLogs, ...(of === "" ? [] : [modelOf(of)])])].sort();
}

/** True if an engine of it is among the node's replicas. */
function runs(running: readonly LiveModel[], of: string): boolean {
  return running.some((model) => of === model.model_name || of === `${model.model_name}#${model.replica_index}`);
}

function NothingChosen({ storedLogs }: { storedLogs: UseQueryResult<string[]> }): ReactNode {
  if (storedLogs.isPending) return <Loading subject="the list of logs" />;
  if (storedLogs.error !== null) return <Problem error={storedLogs.error} onRetry={() => void storedLogs.refetch()} />;
  if (storedLogs.data.length > 0) return null;
  return <Empty title="No logs on this node">No model has been loaded here since the worker started.</Empty>;
}

interface ReplicaChoiceProps {
  models: readonly string[];
  running: readonly LiveModel[];
  of: string;
  onChange: (of: string) => void;
}

/** The choice of a model and, of several replicas, of one. */
function ReplicaChoice({ models, running, of, onChange }: ReplicaChoiceProps): ReactNode {
  const name = modelOf(of);
  const replicas = running.filter((model) => model.model_name === name).map((model) => model.replica_index);
  const requestedIndex = of.includes("#") ? Number(of.slice(of.indexOf("#") + 1)) : null;
  const shown = [...new Set(requestedIndex === null || Number.isNaN(requestedIndex) ? replicas : [...replicas, requestedIndex])].sort((left, right) => left - right);
  if (models.length === 0) return null;
  return (
    <div className="row wrap">
      <Select label="Model" labelled="before" value={name} options={[...(name === "" ? [["", "Choose a model"] as const] : []), ...models.map((model) => [model, model] as const)]} onChange={onChange} />
      {shown.length > 0 && (
        <Choices
          legend="Replica"
          value={of}
          choices={[
            ...shown.map((replica) => ({ value: `${name}#${replica}`, label: String(replica) })),
            { value: name, label: "All merged" },
          ]}
          onChange={onChange}
        />
      )}
    </div>
  );
}

interface ChoicesProps<Value extends string> {
  legend: string;
  value: Value;
  choices: readonly { value: Value; label: string }[];
  onChange: (value: Value) => void;
}

function Choices<Value extends string>({ legend, value, choices, onChange }: ChoicesProps<Value>): ReactNode {
  const name = useId();
  return (
    <fieldset className="log-choices">
      <legend className="visually-hidden">{legend}</legend>
      {choices.map((choice) => (
        <label key={choice.value}>
          <input type="radio" name={name} checked={choice.value === value} onChange={() => onChange(choice.value)} />
          {choice.label}
        </label>
      ))}
    </fieldset>
  );
}

/** The log as it comes, and whether it is still wanted. */
function useTail(id: string, of: string): [TailState, Tail] {
  const [tail] = useState(() => new Tail(id, of));
  useEffect(() => {
    tail.start();
    return () => tail.stop();
  }, [tail]);
  // Who has signed in again, or is on the network again, does not wait, nor look at a log whose socket is dead.
  const feed = useLive((state) => state.connection);
  useChange(feed, (previous) => {
    if (feed === "live") tail.feedIsLive(previous === "connecting");
  });
  return [useSyncExternalStore(tail.subscribe, tail.read), tail];
}

type SetPlace = (change: (previous: Place) => Place) => void;

interface OneLogProps {
  id: string;
  node: string;
  place: Place;
  onPlace: SetPlace;
  ended: boolean;
}

function OneLog({ id, node, place, onPlace, ended }: OneLogProps): ReactNode {
  const [state, tail] = useTail(id, place.of);
  const [paused, setPaused] = useState<readonly Line[] | null>(null);
  const [isFollowing, setFollows] = useState(true);
  const [details, setDetails] = useState(true);
  const { stream } = place;
  const term = useDeferredValue(place.term);
  const present = paused ?? state.lines;
  const shown = useMemo(() => chosen(present, { term, stream }), [present, term, stream]);
  const pause = () => setPaused(paused === null ? state.lines : null);
  const clear = () => {
    tail.clear();
    setPaused(null);
  };
  useTailAnnouncements(state);
  return (
    <>
      <div className="row wrap log-tools">
        <Filters place={place} onPlace={onPlace} />
        <PauseButton paused={paused} lines={state.lines} onPress={pause} />
        <Button refusal={shown.length === 0 ? "No lines to download" : ""} onClick={() => download(fileName(node, place.of, new Date()), asText(shown), "text/plain;charset=utf-8")}>
          Download
        </Button>
        <Button refusal={state.lines.length === 0 ? "No lines to clear" : ""} onClick={clear}>
          Clear
        </Button>
        <Checkbox label="Follow" on={isFollowing} onChange={setFollows} />
        <Checkbox label="Details" on={details} onChange={setDetails} />
      </div>
      <p className="row wrap muted">
        <Connection state={state} paused={paused !== null} />
        <span data-testid="log-count">
          {shown.length < present.length && `${shown.length} of `}
          {count(present.length, "line")}
        </span>
        {ended && state.lines.length > 0 && <span>This engine is not running. These are its last lines.</span>}
      </p>
      {state.problem !== null && <Problem error={state.problem} onRetry={tail.now} />}
      {shown.length > 0 ? (
        <LogView lines={shown} term={term} details={details} isFollowing={isFollowing && paused === null} onFollowing={setFollows} label={`Log of ${place.of}`} />
      ) : (
        <NoLines any={present.length > 0} connection={state.connection} ended={ended} onAll={() => onPlace((previous) => ({ ...previous, term: "", stream: "" }))} />
      )}
    </>
  );
}

function Filters({ place, onPlace }: { place: Place; onPlace: SetPlace }): ReactNode {
  const box = useRef<HTMLInputElement>(null);
  useShortcut("f", () => box.current?.focus(), "Search the log");
  return (
    <>
      <input
        ref={box}
        className="input log-search"
        type="search"
        aria-label="Search the log"
        placeholder="Search"
        value={place.term}
        onChange={(event) => onPlace((previous) => ({ ...previous, term: event.target.value }))}
      />
      <Choices
        legend="Stream"
        value={place.stream}
        choices={STREAMS.map((choice) => ({ value: choice.stream, label: choice.label }))}
        onChange={(value) => onPlace((previous) => ({ ...previous, stream: value }))}
      />
    </>
  );
}

interface PauseButtonProps {
  paused: readonly Line[] | null;
  lines: readonly Line[];
  onPress: () => void;
}

/** The button that resumes a paused log; it shows the number of new lines. */
function PauseButton({ paused, lines, onPress }: PauseButtonProps): ReactNode {
  useShortcut("p", onPress, "Pause or resume the log");
  const newer = paused === null ? 0 : (lines.at(-1)?.number ?? 0) - (paused.at(-1)?.number ?? 0);
  return (
    <Button onClick={onPress}>
      {paused === null ? "Pause" : "Resume"}
      {newer > 0 && ` (${newer} new)`}
    </Button>
  );
}

interface NoLinesProps {
  /** There are lines, but none of them matches. */
  any: boolean;
  connection: TailState["connection"];
  ended: boolean;
  onAll: () => void;
}

function NoLines({ any, connection, ended, onAll }: NoLinesProps): ReactNode {
  if (any) {
    return (
      <Empty title="No matching lines">
        <Button onClick={onAll}>Show all</Button>
      </Empty>
    );
  }
  if (connection === "connecting") return <Loading subject="the log" />;
  if (connection === "lost") return null;
  return (
    <Empty title="No output yet">
      {ended ? "No engine of this model is running, and the worker keeps no output of an earlier one." : "New lines appear here as the engine writes them."}
    </Empty>
  );
}

function Connection({ state, paused }: { state: TailState; paused: boolean }): ReactNode {
  if (state.connection === "lost") return <span className="pill warn">Reconnecting</span>;
  if (state.connection === "connecting") return <span className="pill">Connecting</span>;
  return paused ? <span className="pill info">Paused</span> : <span className="pill good">Live</span>;
}

/** Says once that lines are missed, and once that they come again. */
function useTailAnnouncements({ connection }: TailState): void {
  useChange(connection, (previous) => {
    if (connection === "lost") announce("The log is not live. Reconnecting.");
    if (connection === "live" && previous === "lost") announce("The log is live again.");
  });
}
