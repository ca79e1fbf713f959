// The page of scheduling rules: each with what it asks for, what the last pass made of it and why, and where its
// replicas are. The feed says when to read them again; replicas come from the feed itself.
import { useMemo, useState, type ReactNode } from "react";
import { Link } from "react-router";
import { useAction } from "../api/action";
import { addressOf, termIn } from "../backends/catalogue";
import { useThrottledNodes } from "../backends/throttled-nodes";
import { count, exact, formatTimeLeft } from "../lib/format";
import { useInAddress } from "../lib/in-address";
import { matchesWords } from "../lib/words";
import { useNow } from "../live/hooks";
import { modelAddress, placesOf, type Places } from "../models/rows";
import { LabelChips } from "../nodes/shared/names";
import { announce } from "../ui/announce";
import { Button } from "../ui/button";
import { Confirm } from "../ui/dialog";
import { Empty, Loading } from "../ui/empty";
import { Problem } from "../ui/problem";
import type { Column } from "../ui/rows";
import { Table } from "../ui/table";
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
  return (
    <div className="rules">
      <PageHead title="Scheduling" note="Replicas per model.">
        {rules.data?.length !== 0 && <Button onClick={() => setOpened({ dialog: "edit", rule: null })}>Add rule…</Button>}
      </PageHead>
      {rules.isPending && <Loading subject="scheduling rules" />}
      <Problem error={rules.error} onRetry={() => void rules.refetch()} />
      {rules.data?.length === 0 && <NoRules onAdd={() => setOpened({ dialog: "edit", rule: null })} />}
      {rules.data !== undefined && rules.data.length > 0 && <Rules rules={rules.data} onOpen={setOpened} />}
      <LabelsCard />
      {opened?.dialog === "edit" && <RuleDialog rule={opened.rule} onClose={close} />}
      {opened?.dialog === "delete" && <DeleteRule rule={opened.rule} onClose={close} />}
    </div>
  );
}

function NoRules({ onAdd }: { onAdd: () => void }): ReactNode {
  return (
    <Empty title="No scheduling rules">
      <p>
        A rule sets how many replicas of a model run, and which labels a node needs to run it. The cluster loads missing
        replicas automatically. Without a rule, a model is loaded on its first request, on any node where it fits.
      </p>
      <Button onClick={onAdd}>Add rule…</Button>
    </Empty>
  );
}

function Rules({ rules, onOpen }: { rules: readonly Rule[]; onOpen: (opened: Opened) => void }): ReactNode {
  const [term, setTerm] = useInAddress(termIn, addressOf);
  const nodes = useThrottledNodes();
  const columns = useMemo(() => columnsOf(placesOf(nodes.values()), onOpen), [nodes, onOpen]);
  const matches = rules.filter((rule) => matchesWords(term, `${rule.model_name} ${rule.node_selector ?? ""}`));
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
        <Table name="Scheduling rules" className="rule-table" columns={columns} rows={matches} rowId={modelOf} rowName={modelOf} />
      )}
    </>
  );
}

const modelOf = (rule: Rule) => rule.model_name;

function columnsOf(places: ReadonlyMap<string, Places>, onOpen: (opened: Opened) => void): readonly Column<Rule>[] {
  return [
    {
      key: "model",
      title: "Model",
      value: modelOf,
      cell: (rule) => (
        <Link to={modelAddress(rule.model_name)}>
          <bdi>{rule.model_name}</bdi>
        </Link>
      ),
    },
    { key: "nodes", title: "Nodes", cell: (rule) => <Chips rule={rule} /> },
    {
      key: "replicas",
      title: "Replicas",
      value: (rule) => rule.state?.wanted ?? null,
      largestFirst: true,
      cell: (rule) => (
        <div className="rule-state">
          <span>{demand(rule)}</span>
          <Figures rule={rule} />
          <Running places={places.get(rule.model_name) ?? []} />
        </div>
      ),
    },
    { key: "state", title: "State", cell: (rule) => <State rule={rule} /> },
    {
      key: "actions",
      title: "Actions",
      cell: (rule) => (
        <div className="row wrap">
          <Button small aria-label={`Edit rule of ${rule.model_name}`} onClick={() => onOpen({ dialog: "edit", rule })}>
            Edit…
          </Button>
          <Button small aria-label={`Delete rule of ${rule.model_name}`} onClick={() => onOpen({ dialog: "delete", rule })}>
            Delete…
          </Button>
        </div>
      ),
    },
  ];
}

function Chips({ rule }: { rule: Rule }): ReactNode {
  const selector = selectorOf(rule);
  if (selector === null) return <span className="risk">The selector is invalid and matches no node.</span>;
  const labels = Object.entries(selector);
  if (labels.length === 0) return <span className="muted">Any node</span>;
  return <LabelChips labels={labels} />;
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
      {wait > 0 && <span title={exact(rule.unsatisfiable_until ?? "")}>next attempt in {formatTimeLeft(wait)}</span>}
      {rule.unsatisfiable_ticks > 0 && <span className="muted">{count(rule.unsatisfiable_ticks, "pass", "passes")} in a row could not load all wanted replicas</span>}
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
  const remove = useAction(
    () => deleteRule(rule.model_name),
    async () => {
      await reread();
      announce(`Rule of ${rule.model_name} deleted.`);
    },
  );
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
      busy={remove.busy}
      error={remove.error}
      onConfirm={() => remove.run(undefined, onClose)}
    >
      <p>No replica stops now. Replicas that end are no longer replaced, and any node can run the model.</p>
    </Confirm>
  );
}
