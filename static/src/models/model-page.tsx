// One model: where it runs and why, its definition with the revisions, its files, and the ways to try it. Replicas and
// work come with the feed; each tab reads what it shows.
import { useState, type ReactNode } from "react";
import { Link, useNavigate, useParams } from "react-router";
import { ApiError } from "../api/client";
import { chatAddress } from "../chat/models";
import { demand } from "../scheduling/rules";
import { Button } from "../ui/button";
import { Empty, Loading } from "../ui/empty";
import { Menu } from "../ui/menu";
import { Problem } from "../ui/problem";
import { Tabs } from "../ui/tabs";
import { PageHead } from "../ui/title";
import { ActionDialog, menuOf, type ModelAction } from "./actions";
import { replicaText, StatePill } from "./columns";
import { useDefinitionList } from "./definitions";
import { DefinitionTab } from "./definition-tab";
import { FilesTab } from "./files-tab";
import { OverviewTab } from "./overview-tab";
import { RevisionsTab } from "./revisions-tab";
import { backendOf, canTalk, loadRefusal, modelAddress, type ModelRow } from "./rows";
import type { DefinitionDetail } from "./shapes";
import { TryTab } from "./try-tab";
import { useModelRows } from "./use-rows";
import "../nodes/detail/detail.css";
import "../nodes/shared/shared.css";
import "../operations/operations.css";
import "../operations/record.css";
import "../overview/overview.css";
import "./models.css";

interface Tab {
  id: string;
  title: string;
  /** False: shown without a definition too. */
  isOfDefinition: boolean;
  /** Absent: the definition, which stays while it is edited. */
  show?: (row: ModelRow) => ReactNode;
}

const DEFINITION = "definition";
const TABS: readonly [Tab, ...Tab[]] = [
  { id: "overview", title: "Overview", isOfDefinition: false, show: (row) => <OverviewTab row={row} /> },
  { id: DEFINITION, title: "Definition", isOfDefinition: true },
  { id: "revisions", title: "Revisions", isOfDefinition: true, show: ({ name }) => <RevisionsTab name={name} /> },
  { id: "files", title: "Files", isOfDefinition: true, show: (row) => <FilesTab row={row} /> },
  { id: "try", title: "Try it", isOfDefinition: true, show: (row) => <TryTab row={row} /> },
];

export function ModelPage(): ReactNode {
  const { name = "", tab = "overview" } = useParams();
  // Another model is another page: nothing typed for the one before may stay.
  return <OneModel key={name} name={name} tab={tab} />;
}

function OneModel({ name, tab }: { name: string; tab: string }): ReactNode {
  const definitions = useDefinitionList();
  const { rows, isKnown } = useModelRows();
  const row = rows.find((candidate) => candidate.name === name);
  if (row !== undefined && !definitions.isPending) return <Shown row={row} tab={tab} error={definitions.error} />;
  const isMissing = isKnown && definitions.data !== undefined;
  return (
    <div className="models-page">
      <PageHead title={isMissing ? "Model not found" : name} named={!isMissing} note={<Link to="/app/models">Models</Link>} />
      <Problem error={definitions.error} onRetry={() => void definitions.refetch()} />
      {isMissing ? (
        <Empty title="No model has this name.">
          <p className="anywhere">
            <bdi>{name}</bdi> is not defined and has no replicas.
          </p>
          <Link className="button primary" to="/app/models/add">
            Add a model
          </Link>
        </Empty>
      ) : (
        definitions.error === null && <Loading subject="the model" />
      )}
    </div>
  );
}

function tabAddress({ name }: ModelRow, { id }: Tab): string {
  return modelAddress(name, id === "overview" ? "" : id);
}

function Shown({ row, tab, error }: { row: ModelRow; tab: string; error: Error | null }): ReactNode {
  const [action, setAction] = useState<ModelAction | null>(null);
  const navigate = useNavigate();
  const hasDefinition = row.definition !== undefined;
  const tabs = TABS.filter(({ isOfDefinition }) => hasDefinition || !isOfDefinition);
  const current = tabs.find(({ id }) => id === tab) ?? TABS[0];
  return (
    <div className="models-page">
      <PageHead title={row.name} named note={<Link to="/app/models">Models</Link>}>
        {canTalk(row) && (
          <Link className="button" to={chatAddress(row.name)}>
            Chat
          </Link>
        )}
        <Button refusal={loadRefusal(row)} onClick={() => setAction({ verb: "load", row })}>
          Load…
        </Button>
        <Menu name={`Actions for ${row.name}`} trigger={<Button>More <span aria-hidden="true">▾</span></Button>} items={menuOf(row, setAction, (address) => void navigate(address))} />
      </PageHead>
      <div className="row wrap model-facts">
        <StatePill row={row} />
        <span>Replicas {replicaText(row)}</span>
        {backendOf(row) !== "" && (
          <span>
            Backend <bdi>{backendOf(row)}</bdi>
          </span>
        )}
        {!hasDefinition && <span className="tag">not defined on this server</span>}
        {row.rule !== undefined && <Link to={`/app/scheduling?q=${encodeURIComponent(row.name)}`}>Rule: {demand(row.rule)}</Link>}
      </div>
      <Problem error={error instanceof ApiError && error.status === 404 ? null : error} />
      <Tabs label="Sections of this model" current={tabAddress(row, current)} tabs={tabs.map((part) => ({ to: tabAddress(row, part), title: part.title }))} />
      <Content tab={current} row={row} />
      {action !== null && <ActionDialog action={action} onClose={() => setAction(null)} onDeleted={() => void navigate("/app/models")} />}
    </div>
  );
}

/** The chosen tab; a definition that is being edited stays, hidden, so that nothing typed is lost. */
function Content({ tab, row }: { tab: Tab; row: ModelRow }): ReactNode {
  const [edited, setEdited] = useState<DefinitionDetail | null>(null);
  const isDefinition = tab.id === DEFINITION;
  return (
    <>
      {tab.show?.(row)}
      {row.definition !== undefined && (isDefinition || edited !== null) && (
        <div hidden={!isDefinition}>
          <DefinitionTab name={row.name} edited={edited} onEdit={setEdited} />
        </div>
      )}
    </>
  );
}
