// The operations strip: one line under every page while there is something to tell, opened to a list by its button.
// A failure comes first and stays until it is dismissed; a good end is said for four seconds.
import { useEffect, useId, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { useAction } from "../api/action";
import { announce } from "../ui/announce";
import { ProgressBar } from "../ui/bars";
import { Button, IconButton } from "../ui/button";
import { Icon } from "../ui/icons";
import { Problem } from "../ui/problem";
import { act } from "./calls";
import { spoken } from "./announcements";
import { NextCheck, SilenceNotice, WorkGlyph } from "./lines";
import type { Group } from "./model";
import "./operations.css";
import type { Pace } from "./pace";
import { progressTimes } from "./silence";
import { StripList } from "./strip-list";
import { hasBar, headline, hasNextCheck, numbers, subjectOf, where } from "./summary";
import { useWatch, useWork, type Work } from "./watch";

const SUCCESS_MS = 4_000;

/** The key of a hidden strip; a failure has another key than the work. */
function identity(group: Group | undefined): string {
  return group === undefined ? "" : `${group.id} ${group.state === "failed" ? "failed" : ""}`;
}

/** Tells ends to assistive tech, once each; answers the last good one for as long as it shows. */
function useEnds(): string {
  const watch = useWatch();
  const [success, setSuccess] = useState("");
  useEffect(
    () =>
      watch.onEnds((announcements) => {
        announce(spoken(announcements));
        const good = announcements.findLast((end) => end.tone === "good");
        if (good !== undefined) setSuccess(good.text);
      }),
    [watch],
  );
  useEffect(() => {
    if (success === "") return undefined;
    const timer = setTimeout(() => setSuccess(""), SUCCESS_MS);
    return () => clearTimeout(timer);
  }, [success]);
  return success;
}

export function OperationsStrip(): ReactNode {
  const work = useWork();
  const success = useEnds();
  const [open, setOpen] = useState(false);
  const [hidden, setHidden] = useState("");
  const list = useId();
  const [first] = work.groups;
  const shown = identity(first);
  // Another one is first: what was hidden may come back.
  if (hidden !== "" && hidden !== shown) setHidden("");
  if (first === undefined) return success === "" ? null : <Success text={success} />;
  if (hidden === shown) return null;
  return (
    <section className={`strip ${first.state}`} aria-label="Operations" data-testid="operations-strip">
      <StripLine
        shown={shown}
        group={first}
        pace={work.paces.get(first.id)}
        hiddenCount={othersThan(first, work)}
        open={open}
        list={list}
        onToggle={() => setOpen(!open)}
        onHide={() => setHidden(shown)}
      />
      <div id={list} hidden={!open}>
        {open && <StripList work={work} />}
      </div>
    </section>
  );
}

/** Operations that the line does not stand for: with its own, as many as the navigation counts. */
function othersThan(first: Group, { groups }: Work): number {
  return groups.reduce((sum, group) => sum + (group === first ? 0 : group.active.length + group.failed.length), 0);
}

function Success({ text }: { text: string }): ReactNode {
  return (
    <section className="strip completed" aria-label="Operations" data-testid="operations-strip">
      <div className="strip-line">
        <WorkGlyph state="completed" />
        <bdi className="grow name">{text}</bdi>
      </div>
    </section>
  );
}

interface ClearRequest {
  shown: string;
  failed: Group["failed"];
}

interface LineProps {
  /** The subject of the line: its last button depends on it. */
  shown: string;
  group: Group;
  pace: Pace | undefined;
  hiddenCount: number;
  open: boolean;
  list: string;
  onToggle: () => void;
  onHide: () => void;
}

function StripLine({ shown, group, pace, hiddenCount, open, list, onToggle, onHide }: LineProps): ReactNode {
  // Dismissed on the server, for all users.
  const dismissal = useAction((clearRequest: ClearRequest) => act("dismiss", clearRequest.failed));
  const mine = dismissal.input?.shown === shown;
  const away = () => dismissal.run({ shown, failed: group.failed });
  return (
    <>
      <div className="strip-line">
        <WorkGlyph state={group.state} />
        <span className="strip-verb">{headline(group)}</span>
        <strong className="name strip-name" title={group.name}>
          {group.name}
        </strong>
        <StripDetail group={group} pace={pace} />
        {hiddenCount > 0 && (
          <Link className="strip-more" to="/app/activity">
            {hiddenCount} more
          </Link>
        )}
        <IconButton
          name={open ? "Hide the list" : "Show every operation"}
          glyph={
            <span className={`strip-caret ${open ? "open" : ""}`}>
              <Icon name="down" />
            </span>
          }
          small
          aria-expanded={open}
          aria-controls={list}
          onClick={onToggle}
        />
        {group.state === "failed" ? (
          <Button key={shown} small busy={mine && dismissal.busy} aria-label={`Dismiss the failure of ${group.name}`} onClick={away}>
            Dismiss
          </Button>
        ) : (
          <IconButton key={shown} name={`Hide ${group.name}`} glyph={<Icon name="close" />} small onClick={onHide} />
        )}
      </div>
      {mine && <Problem error={dismissal.error} onRetry={away} onDismiss={dismissal.forget} />}
    </>
  );
}

function StripDetail({ group, pace }: { group: Group; pace: Pace | undefined }): ReactNode {
  const percent = Math.floor(group.progress);
  const figuresText = numbers(group, pace);
  return (
    <>
      <span className="strip-where" title={where(group)}>
        {where(group)}
      </span>
      <bdi className="name grow strip-detail">{subjectOf(group)}</bdi>
      {hasNextCheck(group) && <NextCheck operation={group.speaker} />}
      {group.state === "running" && <SilenceNotice of={progressTimes(group.active)} />}
      {group.state === "running" && figuresText !== "" && <span className="strip-figures">{figuresText}</span>}
      {hasBar(group) && (
        <span className="strip-progress">
          <span aria-hidden="true">{percent}%</span>
          <ProgressBar value={percent} name={`${headline(group)} ${group.name}`} />
        </span>
      )}
    </>
  );
}
