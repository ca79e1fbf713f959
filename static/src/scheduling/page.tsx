// The page of scheduling rules: each with what it asks for, what the last pass made of it and why, and where its
// replicas are. The feed says when to read them again; replicas come from the feed itself.
import { useMutation } from "@tanstack/react-query";
import { useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { addressOf, termIn } from "../backends/catalogue";
import { useThrottledNodes } from "../backends/throttled-nodes";
import { count, exact, formatTimeLeft } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import { useNow } from "../live/hooks";
import { placesOf, type Places } from "../models/rows";
import { written } from "../nodes/shared/labels";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import { Ago } from "../ui/time";
import { PageHead } from "../ui/title";
import { LabelsCard } from "./labels-card";
import { RuleDialog } from "./rule-dialog";
import { cooldown, counts, deleteRule, demand, selectorOf, ruleState, useReread, useRules, type Rule } from "./rules";
import "../nodes/detail/detail.css";
import "../nodes/shared/shared.css";
import "./scheduling.css";

/** The dialog that is open. */
type Opened = { dialog: "edit"; rule: Rule | null } | { dialog: "delete"; rule: Rule } | null;

export function SchedulingPage(): ReactNode {
  const rules = useRules();
  const [opened, setOpened] = useState<Opened>(null);
  const close = () => setOpened(null);
  const ruled = (rules.data ?? []).map((rule) => rule.model_name);
  return (
    <div className="rules">
      <PageHead title="Scheduling" note="How many replicas each model shall have, and on which nodes.">
        <Button onClick={() => setOpened({ dialog: "edit", rule: null })}>Add rule…</Button>
      </PageHead>
      {rules.isPending && <Loading subject="scheduling rules" />}
      {rules.error !== null && <Problem error={rules.error} onRetry={() => void rules.refetch()} />}
      {rules.data?.length === 0 && <NoRules />}
      {rules.data !== undefined && rules.data.length > 0 && <Rules rules={rules.data} onOpen={setOpened} />}
      <LabelsCard />
      {opened?.dialog === "edit" && <RuleDialog rule={opened.rule} ruled={ruled} onClose={close} />}
      {opened?.dialog === "delete" && <DeleteRule rule={opened.rule} onClose={close} />}
    </div>
  );
}

function NoRules(): ReactNode {
  return (
    <Empty title="No scheduling rules">
      <p>
        A rule says how many replicas of a model shall run, and which labels a node must have to run it. The cluster then
        loads what is missing by itself. Without a rule, a model is loaded on its first request, on any node where it fits.
      </p>
    </Empty>
  );
}

function Rules({ rules, onOpen }: { rules: readonly Rule[]; onOpen: (opened: Opened) => void }): ReactNode {
  const [term, setTerm] = useInAddress(termIn, addressOf);
  const nodes = useThrottledNodes();
  const places = useMemo(() => placesOf(nodes.values()), [nodes]);
  const words = term.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = rules.filter((rule) => words.every((word) => `${rule.model_name} ${rule.node_selector ?? ""}`.toLowerCase().includes(word)));
  return (
    <>
      <div className="row wrap">
        <input className="input rule-filter" type="search" aria-label="Filter rules" placeholder="Model or label" value={term} onChange={(event) => setTerm(event.target.value)} />
        <span className="muted" role="status">
          {matches.length} of {count(rules.length, "rule")} shown
        </span>
      </div>
      {matches.length === 0 ? (
        <Empty title="No matching rules">
          <Button onClick={() => setTerm("")}>Show all</Button>
        </Empty>
      ) : (
        <table className="nd-table rule-table" aria-label="Scheduling rules">
          <thead>
            <tr>
              <th scope="col">Model</th>
              <th scope="col">Nodes</th>
              <th scope="col">Replicas</th>
              <th scope="col">State</th>
              <th scope="col">Actions</th>
            </tr>
          </thead>
          <tbody>
            {matches.map((rule) => (
              <Row key={rule.model_name} rule={rule} places={places.get(rule.model_name) ?? []} onOpen={onOpen} />
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}

function Row({ rule, places, onOpen }: { rule: Rule; places: Places; onOpen: (opened: Opened) => void }): ReactNode {
  return (
    <tr>
      <th scope="row">
        <Link to={`/app/models?q=${encodeURIComponent(rule.model_name)}`}>
          <bdi>{rule.model_name}</bdi>
        </Link>
      </th>
      <td data-label="Nodes">
        <Chips rule={rule} />
      </td>
      <td data-label="Replicas">
        <div className="rule-state">
          <span>{demand(rule)}</span>
          <Figures rule={rule} />
          <Running places={places} />
        </div>
      </td>
      <td data-label="State">
        <State rule={rule} />
      </td>
      <td data-label="Actions">
        <div className="row wrap">
          <Button small aria-label={`Edit rule of ${rule.model_name}`} onClick={() => onOpen({ dialog: "edit", rule })}>
            Edit…
          </Button>
          <Button small aria-label={`Delete rule of ${rule.model_name}`} onClick={() => onOpen({ dialog: "delete", rule })}>
            Delete…
          </Button>
        </div>
      </td>
    </tr>
  );
}

function Chips({ rule }: { rule: Rule }): ReactNode {
  const selector = selectorOf(rule);
  if (selector === null) return <span className="risk">The selector cannot be read; it matches no node.</span>;
  const labels = Object.entries(selector);
  if (labels.length === 0) return <span className="muted">Any node</span>;
  return (
    <span className="chips">
      {labels.map(([key, value]) => (
        <bdi key={key} className="tag anywhere">
          {written(key, value)}
        </bdi>
      ))}
    </span>
  );
}

/** The replicas that the last pass aims at, and those that exist now. */
function Figures({ rule }: { rule: Rule }): ReactNode {
  const figures = rule.state;
  if (figures === undefined) return null;
  return (
    <dl className="rule-figures">
      <Figure name="wanted" value={figures.wanted} />
      <Figure name="running" value={figures.current} />
      <Figure name="loading" value={figures.loading} />
    </dl>
  );
}

function Figure({ name, value }: { name: string; value: number }): ReactNode {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

const NAMED = 6;

/** The nodes that have replicas now. */
function Running({ places }: { places: Places }): ReactNode {
  const nodes = [...new Map(places.map(({ node }) => [node.id, node])).values()];
  if (nodes.length === 0) return null;
  return (
    <span className="chips" role="group" aria-label="Nodes with replicas">
      {nodes.slice(0, NAMED).map((node) => (
        <Link key={node.id} className="tag name" to={`/app/nodes/${node.id}`}>
          {node.name}
        </Link>
      ))}
      {nodes.length > NAMED && <span className="muted">and {nodes.length - NAMED} more</span>}
    </span>
  );
}

function State({ rule }: { rule: Rule }): ReactNode {
  const now = useNow(1000);
  const { tone, word } = ruleState(rule, now);
  const wait = cooldown(rule, now);
  return (
    <div className="rule-state">
      <span className={`pill ${tone}`}>{word}</span>
      {wait > 0 && <span title={exact(rule.unsatisfiable_until ?? "")}>next try in {formatTimeLeft(wait)}</span>}
      {rule.unsatisfiable_ticks > 0 && <span className="muted">{count(rule.unsatisfiable_ticks, "pass", "passes")} in a row could not load what is wanted</span>}
      {counts(rule) && rule.state !== undefined && (
        <span className="anywhere">
          {rule.state.reason}{" "}
          <span className="muted">
            (<Ago at={rule.state.at} />)
          </span>
        </span>
      )}
    </div>
  );
}

function DeleteRule({ rule, onClose }: { rule: Rule; onClose: () => void }): ReactNode {
  const reread = useReread();
  const remove = useMutation({
    mutationFn: () => deleteRule(rule.model_name),
    onSuccess: async () => {
      await reread();
      announce(`Rule of ${rule.model_name} deleted.`);
    },
  });
  return (
    <Confirm
      open
      danger
      onClose={onClose}
      title={
        <>
          Delete the rule of <bdi>{rule.model_name}</bdi>
        </>
      }
      action="Delete"
      busy={remove.isPending}
      error={remove.error}
      onConfirm={() => remove.mutate(undefined, { onSuccess: onClose })}
    >
      <p>Nothing stops now. Replicas that end are no longer replaced, and any node may run the model.</p>
    </Confirm>
  );
}
