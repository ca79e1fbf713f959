// Work in waves on its card: which wave is open, what the others wait for, and the operator's choice.
import { useState, type ReactNode } from "react";
import { useAction } from "../api/action";
import { count } from "../lib/format";
import { useLive } from "../live/hooks";
import type { Operation } from "../live/messages";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { chooseWaves } from "./calls";
import { Confirmations } from "./last-replicas";
import { lastReplicas, waveProgress, waitOf, type Standing } from "./waves";
import { doing, ENDED, ownState } from "./words";

const NAMED = 5;

/** Which wave is open, and what the others wait for; nothing unless it goes in waves. */
export function Waves({ operation }: { operation: Operation }): ReactNode {
  const now = waveProgress(operation);
  if (now === null) return null;
  return (
    <section aria-label={`Waves of ${operation.name}`}>
      <p>
        <strong>
          Wave {now.number} of {now.count}
          {now.isCanary && ", the canary"}
        </strong>
        : <bdi>{names(now)}</bdi>. <span className={now.state === "asks" ? "waits" : "muted"}>{waitOf(now)}</span>
      </p>
    </section>
  );
}

/** The choices about the next waves, for the row of a card's actions; nothing unless it goes in waves. */
export function WaveActions({ operation }: { operation: Operation }): ReactNode {
  const nodes = useLive((state) => state.nodes);
  const [choice, setChoice] = useState<"continue" | "stop" | null>(null);
  const now = waveProgress(operation);
  if (now === null) return null;
  const asks = now.state === "asks";
  // While a wave runs, only a last replica can need a word from the operator.
  const resting = now.open.filter((target) => ["waiting", "retrying"].includes(ownState(target)));
  const models = lastReplicas(operation, asks ? now.later : resting, nodes);
  return (
    <>
      {asks && (
        <Button small kind="primary" aria-label={`Continue with the next wave: ${operation.name}…`} onClick={() => setChoice("continue")}>
          Continue with the next wave…
        </Button>
      )}
      {!asks && models.length > 0 && (
        <Button small aria-label={`Confirm last replicas: ${operation.name}…`} onClick={() => setChoice("continue")}>
          Confirm last replicas…
        </Button>
      )}
      {now.state !== "stopped" && now.later.length > 0 && (
        <Button small aria-label={`Stop after this wave: ${operation.name}…`} onClick={() => setChoice("stop")}>
          Stop after this wave…
        </Button>
      )}
      {choice !== null && <Question operation={operation} now={now} choice={choice} models={choice === "continue" ? models : []} onClose={() => setChoice(null)} />}
    </>
  );
}

function names({ open }: Standing): string {
  const shown = open.slice(0, NAMED).map((target) => target.node_name).join(", ");
  return open.length > NAMED ? `${shown} and ${open.length - NAMED} more` : shown;
}

interface QuestionProps {
  operation: Operation;
  now: Standing;
  choice: "continue" | "stop";
  models: readonly string[];
  onClose: () => void;
}

function Question({ operation, now, choice, models, onClose }: QuestionProps): ReactNode {
  const [confirmed, setConfirmed] = useState<ReadonlySet<string>>(new Set());
  const control = useAction(
    () => chooseWaves(operation, choice, models.filter((model) => confirmed.has(model))),
    () => {
      announce(choice === "stop" ? `Stopped ${doing(operation)} ${operation.name}` : `${operation.name}: continued`);
      onClose();
    },
  );
  const stops = choice === "stop";
  const running = now.open.some((target) => !ENDED.has(ownState(target)));
  return (
    <Confirm open onClose={onClose} title={`${stops ? "Stop" : "Continue"} ${doing(operation)} ${operation.name}${stops ? " after this wave" : ""}`} action={stops ? "Stop" : "Continue"} danger={stops} busy={control.busy} error={control.error} onConfirm={() => control.run()}>
      {stops ? (
        <p>
          {count(now.later.length, "node")} not started: no command is sent. {running && `Wave ${now.number} runs to its end. `}Finished nodes stay as they are.
        </p>
      ) : (
        now.state === "asks" && <p>The next wave starts. Failed nodes stay as they are; retry them when the operation has finished.</p>
      )}
      <Confirmations models={models} confirmed={confirmed} onChange={setConfirmed} />
      {models.length > 0 && <p className="muted">A model that you do not confirm is loaded on another node first, where that is possible.</p>}
    </Confirm>
  );
}
