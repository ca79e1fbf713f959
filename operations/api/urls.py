"""Routes of operations under `/api/`."""

from django.urls import path

from operations.api.history import AuditView, ExportView, HistoryView, InboxView
from operations.api.jobs import DismissView, JobView, ModelJobView, OperationsView, OperationView
from operations.api.verbs import BulkOperationsView, CancelPartView, CancelView, PauseView, RetryView

urlpatterns = [
    path("audit", AuditView.as_view()),
    # Fixed paths before the routes with ids: an id never equals one of them.
    path("operations/history", HistoryView.as_view()),
    path("operations/history/export", ExportView.as_view()),
    path("operations/inbox", InboxView.as_view()),
    path("operations/bulk", BulkOperationsView.as_view()),
    path("operations", OperationsView.as_view()),
    path("operations/<str:job_id>", OperationView.as_view()),
    path("operations/<str:job_id>/nodes/<str:node_id>/cancel", CancelPartView.as_view()),
    path("operations/<str:job_id>/cancel", CancelView.as_view()),
    path("operations/<str:job_id>/pause", PauseView.as_view()),
    path("operations/<str:job_id>/retry", RetryView.as_view()),
    path("operations/<str:job_id>/dismiss", DismissView.as_view()),
    path("backends/job/<str:uid>", JobView.as_view()),
    path("models/job/<str:uid>", ModelJobView.as_view()),
]
