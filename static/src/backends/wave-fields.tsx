// How work goes over several nodes: all at once, or in waves of a number or a share of them.
import { useId, type ReactNode } from "react";
import type { WaveOptions } from "../operations/calls";
import { Checkbox, TextField } from "../ui/text-field";

/** The choice as typed. */
export interface WaveChoice {
  inWaves: boolean;
  canary: boolean;
  /** "2", or "25%". */
  atOnce: string;
  pauseMinutes: string;
  stopAt: string;
}

export const ONE_BY_ONE: WaveChoice = { inWaves: true, canary: true, atOnce: "1", pauseMinutes: "0", stopAt: "1" };

const LONGEST_PAUSE_MINUTES = 24 * 60;
const MOST_NODES = 2000;

function isNumber(text: string, least: number, most: number): boolean {
  const value = Number(text.trim());
  return text.trim() !== "" && Number.isInteger(value) && value >= least && value <= most;
}

function pauseOf({ pauseMinutes }: WaveChoice): number {
  return pauseMinutes.trim() === "" ? 0 : Number(pauseMinutes.replace(",", "."));
}

/** What is wrong with each field; "" if nothing is. */
export function waveProblems(choice: WaveChoice): { atOnce: string; pauseMinutes: string; stopAt: string } {
  const pause = pauseOf(choice);
  return {
    atOnce: isNumber(choice.atOnce, 1, MOST_NODES) || /^\s*([1-9]\d?|100)\s*%\s*$/.test(choice.atOnce) ? "" : "Enter a number, or a percentage such as 25%.",
    pauseMinutes: pause >= 0 && pause <= LONGEST_PAUSE_MINUTES ? "" : `Enter 0 to ${LONGEST_PAUSE_MINUTES} minutes.`,
    stopAt: isNumber(choice.stopAt, 1, MOST_NODES) ? "" : "Enter a number from 1.",
  };
}

/** Why the choice cannot be sent; "" if it can. */
export function waveProblem(choice: WaveChoice): string {
  return choice.inWaves ? (Object.values(waveProblems(choice)).find((problem) => problem !== "") ?? "") : "";
}

/** The options of the request; null for all nodes at once. */
export function wavesOf(choice: WaveChoice): WaveOptions | null {
  if (!choice.inWaves) return null;
  const atOnce = choice.atOnce.replaceAll(/\s/g, "");
  return { canary: choice.canary, max_unavailable: atOnce.endsWith("%") ? atOnce : Number(atOnce), pause_seconds: Math.round(60 * pauseOf(choice)), stop_at_failures: Number(choice.stopAt) };
}

interface FieldsProps {
  choice: WaveChoice;
  onChange: (choice: WaveChoice) => void;
  /** The effect of each way. */
  inWaves: string;
  atOnce: string;
}

export function WaveFields({ choice, onChange, inWaves, atOnce }: FieldsProps): ReactNode {
  const name = useId();
  const problems = waveProblems(choice);
  const change = (patch: Partial<WaveChoice>) => onChange({ ...choice, ...patch });
  return (
    <fieldset className="stack plain-fieldset">
      <legend>How</legend>
      <label className="row">
        <input type="radio" name={name} checked={choice.inWaves} onChange={() => change({ inWaves: true })} />
        {inWaves}
      </label>
      {choice.inWaves && (
        <div className="wave-fields">
          <TextField label="Nodes at a time" value={choice.atOnce} onChange={(value) => change({ atOnce: value })} problem={problems.atOnce} description="Number or percentage" />
          <TextField label="Pause in minutes" value={choice.pauseMinutes} onChange={(value) => change({ pauseMinutes: value })} problem={problems.pauseMinutes} description="Between two waves" numeric />
          <TextField label="Stop at failures" value={choice.stopAt} onChange={(value) => change({ stopAt: value })} problem={problems.stopAt} description="Work then waits for your decision" numeric />
          <Checkbox label="One node first (canary)" on={choice.canary} onChange={(canary) => change({ canary })} />
        </div>
      )}
      <label className="row">
        <input type="radio" name={name} checked={!choice.inWaves} onChange={() => change({ inWaves: false })} />
        {atOnce}
      </label>
    </fieldset>
  );
}
