// The load before the first token, with its phase, bytes and time left, from the feed
// or as the last refusal did.
import type { ReactNode } from "react";
import { Link } from "react-router";
import { useLive } from "../live/hooks";
import { figures, NextCheck, SilenceNotice } from "../operations/lines";
import { pageOf, phaseOf, phrase, placeOf, sendingOf, stateOf } from "../operations/words";
import { useWork } from "../operations/watch";
import type { Operation } from "../live/messages";
import { formatTimeLeft } from "../lib/format";
import { ProgressBar } from "../ui/bars";
import type { Answer } from "./answer";
import type { Loading } from "./stream";
import { loadedOf, loadOf } from "./loads";

export function Waiting({ answer }: { answer: Answer }): ReactNode {
  const load = useLive((state) => (loadedOf(state, answer.model) > 0 ? undefined : loadOf(state, answer.model)));
  if (load !== undefined) return <Load operation={load} eta={answer.loading?.eta_seconds} />;
  if (answer.loading !== null) return <LoadFigures loading={answer.loading} />;
  return (
    <p className="row muted">
      <span className="spinner" aria-hidden="true" /> Waiting for the first token…
    </p>
  );
}

function Load({ operation, eta }: { operation: Operation; eta: number | undefined }): ReactNode {
  const pace = useWork().paces.get(operation.jobID);
  const state = stateOf(operation);
  const title = `${phrase(operation, state)} ${operation.name}`;
  const figuresText = figures(operation.currentBytes ?? 0, operation.totalBytes ?? 0, pace);
  // The rate of the last moments says more than the whole time's.
  const remaining = pace?.secondsLeft == null && eta !== undefined ? `${formatTimeLeft(eta)} left` : "";
  return (
    <div className="chat-load">
      <div className="row wrap">
        <span className="spinner" aria-hidden="true" />
        <Link to={pageOf(operation)}>
          {phrase(operation, state)} <bdi>{operation.name}</bdi> {placeOf(operation)}
        </Link>
      </div>
      <Bar title={title} percent={operation.progress} />
      <p className="muted">
        {sendingOf(operation) || [phaseOf(operation), figuresText, remaining].filter(Boolean).join(" · ")} <NextCheck operation={operation} /> <SilenceNotice of={operation} />
      </p>
      <p className="muted">Your message is sent when the model is loaded.</p>
    </div>
  );
}

function LoadFigures({ loading }: { loading: Loading }): ReactNode {
  const { model, state, node = "", progress, bytes_sent, total_bytes, eta_seconds } = loading;
  const remaining = eta_seconds === undefined ? "" : `${formatTimeLeft(eta_seconds)} left`;
  return (
    <div className="chat-load">
      <p>
        Loading model <bdi>{model}</bdi> {node !== "" && <bdi>on {node}</bdi>}
      </p>
      <Bar title={`Loading model ${model}`} percent={progress} />
      <p className="muted">{[state, figures(bytes_sent, total_bytes, undefined), remaining].filter(Boolean).join(" · ")}</p>
      <p className="muted">Your message is sent when the model is loaded.</p>
    </div>
  );
}

function Bar({ title, percent }: { title: string; percent: number }): ReactNode {
  return (
    <div className="row">
      <div className="grow">
        <ProgressBar name={title} value={percent} />
      </div>
      <span>{Math.floor(percent)}%</span>
    </div>
  );
}
